//! What a rank will hold, in bytes, before anything is allocated.

use std::collections::HashMap;

use super::{BucketLayout, ModelLayout};
use crate::spec::{Dtype, Strategy};

/// Bytes per rank: persistent buffers by category, exact, and upper bounds of the pools of whole buffers.
///
/// Padding is counted: it is allocated. Activations are not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct MemoryPlan {
    /// Model weights in their own dtype: the shard where the strategy shards parameters, else whole.
    pub model_weights: u64,
    /// f32 copies of trainable 16-bit weights that the optimizer updates: the shard, or whole with `NoShard`; the
    /// part of it that the outer rank updates where those share it.
    pub main_weights: u64,
    /// f32 gradients of trainable weights: the shard where the strategy shards gradients, else whole.
    pub main_grads: u64,
    /// *One* f32 state buffer of the optimizer: of as many elements as it updates. AdamW has two of them.
    pub optimizer_state: u64,
    /// Bound of the whole weights that are gathered at a time: two units of each shape class (one if the
    /// class has one unit) and the root. 0 where weights are held whole anyway.
    pub gather_pool: u64,
    /// Bound of the unreduced gradients that are held at a time: likewise, over trainable buckets, in the
    /// wire dtype. 0 where gradients are held whole anyway.
    pub reduce_pool: u64,
}

impl MemoryPlan {
    /// Plans `layout` under `strategy`, gradients being reduced in `wire`.
    pub fn new(layout: &ModelLayout, strategy: Strategy, wire: Dtype) -> MemoryPlan {
        let mut plan = MemoryPlan::default();
        for bucket in &layout.buckets {
            let elements = |sharded| if sharded { bucket.shard_len() } else { bucket.size } as u64;
            let dtype = bucket.key.dtype;
            plan.model_weights += elements(strategy.shards_params()) * dtype.size() as u64;
            if bucket.key.requires_grad {
                let state = bucket.owned_len(strategy) as u64 * 4;
                plan.optimizer_state += state;
                plan.main_weights += if dtype == Dtype::F32 { 0 } else { state };
                plan.main_grads += elements(strategy.shards_grads()) * 4;
            }
        }
        if strategy.shards_params() {
            plan.gather_pool = pool_bound(layout, |_| true, |bucket| bucket.bytes() as u64);
        }
        if strategy.shards_grads() {
            let bytes = |bucket: &BucketLayout| bucket.size as u64 * wire.size() as u64;
            plan.reduce_pool = pool_bound(layout, |bucket| bucket.key.requires_grad, bytes);
        }
        plan
    }

    /// Bytes that stay for the whole run, with an optimizer of `state_buffers` f32 buffers.
    pub fn persistent(&self, state_buffers: usize) -> u64 {
        self.model_weights + self.main_weights + self.main_grads + self.optimizer_state * state_buffers as u64
    }
}

fn pool_bound(
    layout: &ModelLayout,
    counts: impl Fn(&BucketLayout) -> bool,
    bytes: impl Fn(&BucketLayout) -> u64,
) -> u64 {
    let buckets = |unit: usize| {
        layout.units[unit]
            .buckets
            .iter()
            .map(|&bucket| &layout.buckets[bucket])
            .filter(|bucket| counts(bucket))
    };
    let unit_bytes = |unit: usize| buckets(unit).map(&bytes).sum::<u64>();
    let mut units_of_class: HashMap<Vec<(Dtype, usize)>, Vec<usize>> = HashMap::new();
    for unit in 1..layout.units.len() {
        let class = buckets(unit).map(|bucket| (bucket.key.dtype, bucket.size)).collect();
        units_of_class.entry(class).or_default().push(unit);
    }
    let pooled = units_of_class.values().flat_map(|units| units.iter().take(2));
    unit_bytes(0) + pooled.map(|&unit| unit_bytes(unit)).sum::<u64>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{LayoutOptions, ShardAlignment, UnitSpec};
    use crate::spec::{GroupKey, ParamSpec};

    /// Root: 128 trainable. Units 1, 2, 3: 256 trainable and 64 frozen. Unit 4: 512 trainable.
    fn layout(dtype: Dtype, ranks: usize) -> ModelLayout {
        let spec = |name: String, n: usize, unit, requires_grad| ParamSpec {
            name,
            shape: vec![n],
            key: GroupKey { dtype, expert: false, requires_grad, unit },
            no_decay: false,
            tp: None,
            tp_parts: 1,
            shared: false,
        };
        let mut params = vec![spec("root".into(), 128, 0, true)];
        for unit in 1..4 {
            params.push(spec(format!("{unit}.w"), 256, unit, true));
            params.push(spec(format!("{unit}.frozen"), 64, unit, false));
        }
        params.push(spec("4.w".into(), 512, 4, true));
        let units: Vec<UnitSpec> = (0..5).map(|unit| UnitSpec { path: unit.to_string() }).collect();
        let options =
            LayoutOptions { ranks, outer: 1, alignment: ShardAlignment::Element, bucket_size: None };
        ModelLayout::build(params, &units, &options).unwrap()
    }

    const TRAINABLE: u64 = 128 + 3 * 256 + 512;
    const FROZEN: u64 = 3 * 64;

    #[test]
    fn bf16_by_strategy() {
        let layout = layout(Dtype::BF16, 2);
        let plan = |strategy| MemoryPlan::new(&layout, strategy, Dtype::F32);
        let whole = MemoryPlan {
            model_weights: 2 * (TRAINABLE + FROZEN),
            main_weights: 4 * TRAINABLE,
            main_grads: 4 * TRAINABLE,
            optimizer_state: 4 * TRAINABLE,
            gather_pool: 0,
            reduce_pool: 0,
        };
        assert_eq!(plan(Strategy::NoShard), whole);
        let optim = MemoryPlan {
            main_weights: whole.main_weights / 2,
            optimizer_state: whole.optimizer_state / 2,
            ..whole
        };
        assert_eq!(plan(Strategy::Optim), optim);
        let optim_grads =
            MemoryPlan { main_grads: whole.main_grads / 2, reduce_pool: 4 * (128 + 2 * 256 + 512), ..optim };
        assert_eq!(plan(Strategy::OptimGrads), optim_grads);
        let all = MemoryPlan {
            model_weights: whole.model_weights / 2,
            gather_pool: 2 * (128 + 2 * (256 + 64) + 512),
            ..optim_grads
        };
        assert_eq!(plan(Strategy::OptimGradsParams), all);
        assert_eq!(all.persistent(2), TRAINABLE + FROZEN + 4 * 2 * TRAINABLE);
    }

    #[test]
    fn f32_weights_are_their_own_main_weights() {
        let plan = MemoryPlan::new(&layout(Dtype::F32, 4), Strategy::OptimGradsParams, Dtype::BF16);
        assert_eq!(plan.main_weights, 0);
        assert_eq!(plan.model_weights, TRAINABLE + FROZEN);
        assert_eq!(plan.reduce_pool, 2 * (128 + 2 * 256 + 512));
    }
}
