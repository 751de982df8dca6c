//! What a rank will hold, in bytes, before anything is allocated.

use std::collections::HashMap;

use super::{BucketLayout, ModelLayout};
use crate::spec::{Dtype, MixedPrecision, ReshardAfterForward, Strategy};

/// Bytes per rank: persistent buffers by category, exact, and upper bounds of the pools of whole buffers.
///
/// Padding is counted: it is allocated. Activations are not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct MemoryPlan {
    /// Model weights in their own dtype: the shard where the strategy shards parameters, else whole.
    pub model_weights: u64,
    /// f32 copies of trainable 16-bit weights that the optimizer updates, if they are kept: the shard, or whole with `NoShard`; the
    /// part of it that the outer rank updates where those share it.
    pub main_weights: u64,
    /// Reduced gradients of trainable weights, in the precision's dtype for them: the shard where the strategy shards gradients, else whole.
    pub main_grads: u64,
    /// *One* f32 state buffer of the optimizer: of as many elements as it updates. AdamW has two of them.
    pub optimizer_state: u64,
    /// Bound of the whole weights that are gathered at a time: two units of each shape class (one if the
    /// class has one unit) and the root. 0 where weights are held whole anyway, as one rank's shards are.
    pub gather_pool: u64,
    /// Bound of the unreduced gradients that are held at a time: likewise, over trainable buckets, in the
    /// wire dtype. 0 where gradients are held whole, in the wire dtype: they are reduced in place.
    pub reduce_pool: u64,
}

/// Unreduced gradients are in buckets of their own, not in the main gradients.
pub(super) const fn needs_wire_buckets(strategy: Strategy, precision: &MixedPrecision) -> bool {
    strategy.shards_grads() || precision.reduce as u8 != precision.main_grads as u8
}

/// Units of one shape class whose whole buffers exist at a time: one in use, one in flight.
pub(crate) const POOLED_UNITS: usize = 2;

/// What a bucket's memory depends on.
pub(super) struct BucketExtent {
    pub(super) dtype: Dtype,
    pub(super) requires_grad: bool,
    /// Elements of the whole.
    pub(super) size: usize,
    /// Elements of one shard.
    pub(super) shard_len: usize,
    /// Outer ranks that cut the optimizer's part of a shard.
    pub(super) outer: usize,
}

impl BucketExtent {
    fn of(bucket: &BucketLayout) -> BucketExtent {
        BucketExtent {
            dtype: bucket.key.dtype,
            requires_grad: bucket.key.requires_grad,
            size: bucket.size,
            shard_len: bucket.shard_len(),
            outer: bucket.outer,
        }
    }

    /// Bytes of the whole weights.
    pub(super) const fn whole_bytes(&self) -> u64 {
        self.size as u64 * self.dtype.size() as u64
    }

    /// Bytes of the whole weights that are gathered beside the shard: none where one rank's shard is the whole.
    pub(super) const fn gathered_bytes(&self) -> u64 {
        if self.shard_len == self.size { 0 } else { self.whole_bytes() }
    }

    /// Bytes of the unreduced gradients; 0 if it has none.
    pub(super) const fn unreduced_bytes(&self, wire: Dtype) -> u64 {
        if self.requires_grad { self.size as u64 * wire.size() as u64 } else { 0 }
    }

    /// Elements that the optimizer updates.
    const fn owned(&self, strategy: Strategy) -> u64 {
        if self.outer > 1 {
            (self.shard_len / self.outer) as u64
        } else {
            self.elements(strategy.shards_optim())
        }
    }

    const fn elements(&self, sharded: bool) -> u64 {
        if sharded { self.shard_len as u64 } else { self.size as u64 }
    }
}

impl MemoryPlan {
    /// Nothing held.
    pub const NONE: MemoryPlan = MemoryPlan {
        model_weights: 0,
        main_weights: 0,
        main_grads: 0,
        optimizer_state: 0,
        gather_pool: 0,
        reduce_pool: 0,
    };

    /// The same where units do otherwise with their whole weights between forward and backward: `reshard` has
    /// the answer of each unit of `layout`, the root's does not matter.
    #[must_use]
    pub fn with_reshard(
        self,
        layout: &ModelLayout,
        strategy: Strategy,
        reshard: &[ReshardAfterForward],
    ) -> MemoryPlan {
        if !strategy.shards_params() {
            return self;
        }
        let all = |_: &BucketExtent| true;
        let kept_whole =
            |unit: usize| matches!(reshard[unit], ReshardAfterForward::Never | ReshardAfterForward::Ranks(1));
        let pooled = pool_bound(layout, kept_whole, all, BucketExtent::gathered_bytes);
        let kept = |unit: usize| {
            let parts = match reshard[unit] {
                ReshardAfterForward::Ranks(parts) if unit > 0 && parts > 1 => parts as u64,
                _ => return 0,
            };
            let buckets = layout.units[unit].buckets.iter();
            buckets.map(|&bucket| BucketExtent::of(&layout.buckets[bucket]).gathered_bytes() / parts).sum()
        };
        let kept: u64 = (0..layout.units.len()).map(kept).sum();
        MemoryPlan { gather_pool: pooled + kept, ..self }
    }

    /// The same with microbatches whose gradients are not reduced (`no_sync`): those of every unit are held whole.
    #[must_use]
    pub fn with_no_sync(
        self,
        layout: &ModelLayout,
        strategy: Strategy,
        precision: &MixedPrecision,
    ) -> MemoryPlan {
        if !strategy.shards_grads() {
            return self;
        }
        let buckets =
            layout.buckets.iter().map(|bucket| BucketExtent::of(bucket).unreduced_bytes(precision.reduce));
        MemoryPlan { reduce_pool: buckets.sum(), ..self }
    }

    /// Plans `layout` under `strategy` with these dtypes (those of the weights are the layout's).
    pub fn new(layout: &ModelLayout, strategy: Strategy, precision: &MixedPrecision) -> MemoryPlan {
        let mut plan = MemoryPlan::NONE;
        for bucket in &layout.buckets {
            plan.add(&BucketExtent::of(bucket), strategy, precision, 1);
        }
        if strategy.shards_params() {
            plan.gather_pool = pool_bound(layout, |_| false, |_| true, BucketExtent::gathered_bytes);
        }
        if needs_wire_buckets(strategy, precision) {
            plan.reduce_pool = pool_bound(
                layout,
                |_| false,
                |bucket| bucket.requires_grad,
                |bucket| bucket.unreduced_bytes(precision.reduce),
            );
        }
        plan
    }

    /// Adds what stays of `times` such buckets. A sum of more than 2^64 bytes stays there.
    pub(super) const fn add(
        &mut self,
        bucket: &BucketExtent,
        strategy: Strategy,
        precision: &MixedPrecision,
        times: u64,
    ) {
        let weights = bucket.elements(strategy.shards_params()) * bucket.dtype.size() as u64;
        self.model_weights = self.model_weights.saturating_add(weights.saturating_mul(times));
        if bucket.requires_grad {
            let state = (bucket.owned(strategy) * 4).saturating_mul(times);
            self.optimizer_state = self.optimizer_state.saturating_add(state);
            if precision.main_weights && !matches!(bucket.dtype, Dtype::F32) {
                self.main_weights = self.main_weights.saturating_add(state);
            }
            let grads = bucket.elements(strategy.shards_grads()) * precision.main_grads.size() as u64;
            self.main_grads = self.main_grads.saturating_add(grads.saturating_mul(times));
        }
    }

    /// Bytes that stay for the whole run, with an optimizer of `state_buffers` f32 buffers.
    pub const fn persistent(&self, state_buffers: usize) -> u64 {
        let weights = self.model_weights.saturating_add(self.main_weights).saturating_add(self.main_grads);
        weights.saturating_add(self.optimizer_state.saturating_mul(state_buffers as u64))
    }

    /// The same and the pools: all bytes of a rank but activations and what the program itself allocates.
    pub const fn total(&self, state_buffers: usize) -> u64 {
        let pools = self.gather_pool.saturating_add(self.reduce_pool);
        self.persistent(state_buffers).saturating_add(pools)
    }
}

fn pool_bound(
    layout: &ModelLayout,
    alone: impl Fn(usize) -> bool,
    counts: impl Fn(&BucketExtent) -> bool,
    bytes: impl Fn(&BucketExtent) -> u64,
) -> u64 {
    let buckets = |unit: usize| {
        let buckets = layout.units[unit].buckets.iter();
        buckets.map(|&bucket| BucketExtent::of(&layout.buckets[bucket])).filter(&counts)
    };
    let unit_bytes = |unit: usize| buckets(unit).map(|bucket| bytes(&bucket)).sum::<u64>();
    let mut units_of_class: HashMap<Vec<(Dtype, usize)>, Vec<usize>> = HashMap::new();
    for unit in (1..layout.units.len()).filter(|&unit| !alone(unit)) {
        let class = buckets(unit).map(|bucket| (bucket.dtype, bucket.size)).collect();
        units_of_class.entry(class).or_default().push(unit);
    }
    let pooled = units_of_class.values().flat_map(|units| units.iter().take(POOLED_UNITS));
    let whole = (1..layout.units.len()).filter(|&unit| alone(unit)).map(unit_bytes).sum::<u64>();
    unit_bytes(0) + whole + pooled.map(|&unit| unit_bytes(unit)).sum::<u64>()
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
            aliases: Vec::new(),
            fused: Vec::new(),
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
        let plan = |strategy| MemoryPlan::new(&layout, strategy, &MixedPrecision::F32);
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
        let plan = {
            let precision = MixedPrecision { reduce: Dtype::BF16, ..MixedPrecision::F32 };
            MemoryPlan::new(&layout(Dtype::F32, 4), Strategy::OptimGradsParams, &precision)
        };
        assert_eq!(plan.main_weights, 0);
        assert_eq!(plan.model_weights, TRAINABLE + FROZEN);
        assert_eq!(plan.reduce_pool, 2 * (128 + 2 * 256 + 512));
    }
}
