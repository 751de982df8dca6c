//! The memory formula: the bytes that a rank will hold, before anything is allocated.

use std::collections::HashMap;

use super::{BucketLayout, ModelLayout};
use crate::policy::{MixedPrecision, ReshardAfterForward, Strategy};
use crate::spec::Dtype;

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
    /// Bound of the whole weights that are gathered at a time: the root, those units of the schedule's number that are
    /// largest (two, if one is gathered ahead), whatever their shapes, those that units are in which have units of their
    /// own inside, and what is kept between forward and backward. 0 where weights are held whole anyway, as one
    /// rank's shards are.
    pub gather_pool: u64,
    /// Bound of the unreduced gradients that are held at a time: likewise, over trainable buckets, in the
    /// wire dtype. 0 where gradients are held whole, in the wire dtype: they are reduced in place.
    pub reduce_pool: u64,
}

/// Unreduced gradients are in buckets of their own, not in the main gradients.
pub(super) const fn needs_wire_buckets(strategy: Strategy, precision: &MixedPrecision) -> bool {
    strategy.shards_grads() || precision.reduce as u8 != precision.main_grads as u8
}

/// Units whose whole buffers exist at a time, at least: one in use, one in flight.
pub const POOLED_UNITS: usize = 2;

/// What of the schedule of communication takes memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Units gathered ahead: those and one more are whole at a time, two at least.
    pub prefetch: usize,
    /// Most elements of weights that are gathered at a time; `None` for no limit but that.
    pub gather_budget: Option<usize>,
    /// Most elements of gradients that are unreduced at a time; `None` for those of two units.
    pub reduce_budget: Option<usize>,
    /// Whether units keep their whole weights between forward and backward. A unit may say otherwise for itself.
    pub reshard: ReshardAfterForward,
    /// Some microbatches reduce nothing.
    pub no_sync: bool,
    /// Buffers of units that are alike are registered, and stay.
    pub registered: bool,
}

impl Schedule {
    /// One unit ahead, two unreduced, all resharded, every microbatch reduced, nothing registered.
    pub const DEFAULT: Schedule = Schedule {
        prefetch: 1,
        gather_budget: None,
        reduce_budget: None,
        reshard: ReshardAfterForward::Always,
        no_sync: false,
        registered: false,
    };

    /// The bound of gathered weights, where the widest dtype has so many bytes.
    pub const fn gather_limit(&self, widest: usize) -> PoolLimit {
        PoolLimit::gathered(POOLED_UNITS, self.prefetch, self.gather_budget, widest)
    }

    /// The bound of unreduced gradients that travel in `wire`.
    pub const fn reduce_limit(&self, wire: Dtype) -> PoolLimit {
        PoolLimit::unreduced(POOLED_UNITS, self.reduce_budget, wire)
    }
}

impl Default for Schedule {
    fn default() -> Self {
        Schedule::DEFAULT
    }
}

const fn bytes(elements: Option<usize>, size: usize) -> Option<u64> {
    match elements {
        Some(elements) => Some((elements as u64).saturating_mul(size as u64)),
        None => None,
    }
}

/// How much whole buffers of units exist at a time, whatever their shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolLimit {
    /// Most units.
    pub units: usize,
    /// Most bytes. One unit may always be there.
    pub bytes: Option<u64>,
}

impl PoolLimit {
    /// Room for a unit and those `prefetch` ahead of it, for `least` units at least, within a budget in elements of so
    /// many bytes.
    pub const fn gathered(least: usize, prefetch: usize, budget: Option<usize>, size: usize) -> PoolLimit {
        let ahead = prefetch.saturating_add(1);
        PoolLimit { units: if ahead > least { ahead } else { least }, bytes: bytes(budget, size) }
    }

    /// Room for so many units, or for a budget in elements of `wire` instead, however many units they are.
    pub const fn unreduced(units: usize, budget: Option<usize>, wire: Dtype) -> PoolLimit {
        let units = if budget.is_some() { usize::MAX } else { units };
        PoolLimit { units, bytes: bytes(budget, wire.size()) }
    }

    /// Bytes that the limit has room for, of units whose bytes and number are given: those of as many of the largest
    /// units as may be there.
    pub const fn room(&self, units: &[(u64, u64)]) -> u64 {
        let room = largest(units, self.units as u64);
        let Some(most) = self.bytes else { return room };
        let one = largest(units, 1);
        let most = if most > one { most } else { one };
        if most < room { most } else { room }
    }
}

/// Bytes of the `most` largest of the units.
const fn largest(units: &[(u64, u64)], most: u64) -> u64 {
    let (mut sum, mut left, mut below) = (0u64, most, u64::MAX);
    while left > 0 && below > 0 {
        // The next smaller size, and how many units have it.
        let (mut size, mut count) = (0, 0);
        let mut i = 0;
        while i < units.len() {
            let (bytes, times) = units[i];
            if bytes < below && bytes > size {
                (size, count) = (bytes, times);
            } else if bytes < below && bytes == size {
                count += times;
            }
            i += 1;
        }
        let taken = if count < left { count } else { left };
        sum = sum.saturating_add(size.saturating_mul(taken));
        (left, below) = (left - taken, size);
    }
    sum
}

/// The units of a model, as a pool of whole buffers sees them.
pub(super) struct PooledUnits<'a> {
    /// Bytes of the units that have buffers of their own, the root among them.
    pub(super) alone: u64,
    /// Most bytes of units that are there because units inside them are.
    pub(super) enclosing: u64,
    /// Bytes and number of the units of each class that takes turns in the same buffers.
    pub(super) classes: &'a mut [(u64, u64)],
}

impl PooledUnits<'_> {
    /// Bytes of all.
    const fn all(&self) -> u64 {
        self.alone.saturating_add(largest(self.classes, u64::MAX))
    }

    /// Most bytes at a time under `limit`; where buffers of classes that repeat are `registered`, they stay.
    pub(super) const fn bound(self, limit: PoolLimit, registered: bool) -> u64 {
        let all = self.all();
        let mut bound = self.alone.saturating_add(self.enclosing);
        let mut i = 0;
        while registered && i < self.classes.len() {
            let (bytes, count) = self.classes[i];
            if count > 1 {
                let stay = if count < limit.units as u64 { count } else { limit.units as u64 };
                bound = bound.saturating_add(bytes.saturating_mul(stay));
                self.classes[i].1 = 0;
            }
            i += 1;
        }
        bound = bound.saturating_add(limit.room(self.classes));
        if bound < all { bound } else { all }
    }
}

/// Whether a unit's whole weights stay between forward and backward, in buffers of its own.
pub(super) const fn keeps_whole(reshard: ReshardAfterForward) -> bool {
    matches!(reshard, ReshardAfterForward::Never | ReshardAfterForward::Ranks(1))
}

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

    /// Bytes of the part of the whole weights that is kept between forward and backward.
    pub(super) const fn kept_bytes(&self, reshard: ReshardAfterForward) -> u64 {
        match reshard {
            ReshardAfterForward::Ranks(parts) if parts > 1 => self.gathered_bytes() / parts as u64,
            _ => 0,
        }
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

    /// Plans `layout` under `strategy` with these dtypes (those of the weights are the layout's), with the
    /// [default](Schedule::DEFAULT) schedule.
    pub fn new(layout: &ModelLayout, strategy: Strategy, precision: &MixedPrecision) -> MemoryPlan {
        Self::scheduled(layout, strategy, precision, &Schedule::DEFAULT, |_| None)
    }

    /// The plan of a layout under a schedule. `reshard` gives a unit's own answer, or `None` where that of the schedule
    /// holds; the root's is not read.
    pub fn scheduled(
        layout: &ModelLayout,
        strategy: Strategy,
        precision: &MixedPrecision,
        schedule: &Schedule,
        reshard: impl Fn(usize) -> Option<ReshardAfterForward>,
    ) -> MemoryPlan {
        let mut plan = MemoryPlan::NONE;
        for bucket in &layout.buckets {
            plan.add(&BucketExtent::of(bucket), strategy, precision, 1);
        }
        let reshard = |unit: usize| reshard(unit).unwrap_or(schedule.reshard);
        if strategy.shards_params() {
            let widest = layout.buckets.iter().map(|bucket| bucket.key.dtype.size()).max().unwrap_or(0);
            let alone = |unit: usize| keeps_whole(reshard(unit));
            let bound = pooled(
                layout,
                alone,
                |_| true,
                BucketExtent::gathered_bytes,
                |units| units.bound(schedule.gather_limit(widest), schedule.registered),
            );
            let kept = (1..layout.units.len()).map(|unit| {
                let buckets = layout.units[unit].buckets.iter();
                let bytes =
                    |&bucket: &usize| BucketExtent::of(&layout.buckets[bucket]).kept_bytes(reshard(unit));
                buckets.map(bytes).sum::<u64>()
            });
            plan.gather_pool = bound + kept.sum::<u64>();
        }
        if needs_wire_buckets(strategy, precision) {
            let wire = precision.reduce;
            let no_sync = schedule.no_sync && strategy.shards_grads();
            let trainable = |bucket: &BucketExtent| bucket.requires_grad;
            let bytes = |bucket: &BucketExtent| bucket.unreduced_bytes(wire);
            plan.reduce_pool = pooled(
                layout,
                |_| no_sync,
                trainable,
                bytes,
                |units| units.bound(schedule.reduce_limit(wire), schedule.registered),
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

    /// All bytes of a rank, pools included, but neither activations nor what the program itself allocates.
    pub const fn total(&self, state_buffers: usize) -> u64 {
        let pools = self.gather_pool.saturating_add(self.reduce_pool);
        self.persistent(state_buffers).saturating_add(pools)
    }
}

/// Calls `bound` with the units of `layout`: those that are `alone` apart, and of each unit the buckets that count.
fn pooled(
    layout: &ModelLayout,
    alone: impl Fn(usize) -> bool,
    counts: impl Fn(&BucketExtent) -> bool,
    bytes: impl Fn(&BucketExtent) -> u64,
    bound: impl FnOnce(PooledUnits<'_>) -> u64,
) -> u64 {
    let buckets = |unit: usize| {
        let buckets = layout.units[unit].buckets.iter();
        buckets.map(|&bucket| BucketExtent::of(&layout.buckets[bucket])).filter(&counts)
    };
    let unit_bytes = |unit: usize| buckets(unit).map(|bucket| bytes(&bucket)).sum::<u64>();
    let mut classes: HashMap<Vec<(Dtype, usize)>, (u64, u64)> = HashMap::new();
    let mut own = unit_bytes(0);
    // Bytes of the units that each is inside of, one inside the other, but the root and those with buffers of their own.
    let mut around = vec![0; layout.units.len()];
    for unit in 1..layout.units.len() {
        if let Some(outer) = layout.units[unit].enclosing.filter(|&outer| outer > 0) {
            around[unit] = around[outer] + if alone(outer) { 0 } else { unit_bytes(outer) };
        }
        if alone(unit) {
            own += unit_bytes(unit);
            continue;
        }
        let class = buckets(unit).map(|bucket| (bucket.dtype, bucket.size)).collect();
        classes.entry(class).or_insert((unit_bytes(unit), 0)).1 += 1;
    }
    let enclosing = around.into_iter().max().unwrap_or(0);
    let mut classes: Vec<(u64, u64)> = classes.into_values().collect();
    bound(PooledUnits { alone: own, enclosing, classes: &mut classes })
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
        let units: Vec<UnitSpec> = (0..5).map(|unit| UnitSpec::new(unit.to_string())).collect();
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
            MemoryPlan { main_grads: whole.main_grads / 2, reduce_pool: 4 * (128 + 256 + 512), ..optim };
        assert_eq!(plan(Strategy::OptimGrads), optim_grads);
        let all = MemoryPlan {
            model_weights: whole.model_weights / 2,
            gather_pool: 2 * (128 + (256 + 64) + 512),
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
        assert_eq!(plan.reduce_pool, 2 * (128 + 256 + 512));
    }

    #[test]
    fn the_bound_is_over_all_shapes_and_says_what_the_schedule_asks_for() {
        let layout = layout(Dtype::F32, 2);
        let pools = |schedule: Schedule| {
            let strategy = Strategy::OptimGradsParams;
            let plan = MemoryPlan::scheduled(&layout, strategy, &MixedPrecision::F32, &schedule, |_| None);
            (plan.gather_pool / 4, plan.reduce_pool / 4)
        };
        let default = Schedule::DEFAULT;
        // Units of 320 (three times) and 512; 256 and 512 trainable.
        assert_eq!(pools(default), (128 + 512 + 320, 128 + 512 + 256));
        assert_eq!(pools(Schedule { prefetch: 0, ..default }), pools(default));
        assert_eq!(pools(Schedule { prefetch: 2, ..default }).0, 128 + 512 + 2 * 320);
        assert_eq!(pools(Schedule { prefetch: 9, ..default }).0, 128 + 512 + 3 * 320);
        // A budget may hold two units of the one size, and one unit is always there.
        assert_eq!(pools(Schedule { gather_budget: Some(640), ..default }).0, 128 + 640);
        assert_eq!(pools(Schedule { gather_budget: Some(0), ..default }).0, 128 + 512);
        assert_eq!(pools(Schedule { reduce_budget: Some(0), ..default }).1, 128 + 512);
        assert_eq!(pools(Schedule { reduce_budget: Some(1000), ..default }).1, 128 + 1000);
        assert_eq!(pools(Schedule { reduce_budget: Some(1 << 20), ..default }).1, 128 + 3 * 256 + 512);
        assert_eq!(pools(Schedule { no_sync: true, ..default }).1, 128 + 3 * 256 + 512);
        let never = Schedule { reshard: ReshardAfterForward::Never, ..default };
        assert_eq!(pools(never).0, 128 + 3 * 320 + 512);
        let pairs = Schedule { reshard: ReshardAfterForward::Ranks(2), ..default };
        assert_eq!(pools(pairs).0, pools(default).0 + (3 * 320 + 512) / 2);
        // Two of the three that are alike stay registered, beside the one that comes and goes.
        assert_eq!(pools(Schedule { registered: true, ..default }).0, 128 + 2 * 320 + 512);
    }

    #[test]
    fn units_around_others_are_there_besides() {
        // Units by the one they are inside of, 0 for the root, and their elements.
        let of = |units: &[(usize, usize)]| {
            let specs = units.iter().enumerate().map(|(index, &(outer, _))| UnitSpec {
                path: index.to_string(),
                enclosing: (outer > 0).then_some(outer),
            });
            let specs: Vec<UnitSpec> = std::iter::once(UnitSpec::new("")).chain(specs).collect();
            let params = units.iter().enumerate().map(|(index, &(_, n))| ParamSpec {
                name: index.to_string(),
                shape: vec![n],
                key: GroupKey { dtype: Dtype::F32, expert: false, requires_grad: true, unit: index + 1 },
                no_decay: false,
                tp: None,
                tp_parts: 1,
                shared: false,
                aliases: Vec::new(),
                fused: Vec::new(),
            });
            let options =
                LayoutOptions { ranks: 2, outer: 1, alignment: ShardAlignment::Element, bucket_size: None };
            let layout = ModelLayout::build(params.collect(), &specs, &options).unwrap();
            let plan = MemoryPlan::new(&layout, Strategy::OptimGradsParams, &MixedPrecision::F32);
            assert_eq!(plan.gather_pool, plan.reduce_pool);
            plan.gather_pool / 4
        };
        // Two blocks of 32 around units of 640 and 320: a block, and the two largest.
        assert_eq!(of(&[(0, 32), (1, 640), (1, 320), (0, 32), (4, 640), (4, 320)]), 32 + 2 * 640);
        // The same without blocks.
        assert_eq!(of(&[(0, 32), (0, 640), (0, 320), (0, 32), (0, 640), (0, 320)]), 2 * 640);
        // Three deep; no more than there is.
        assert_eq!(of(&[(0, 32), (1, 64), (2, 128)]), 32 + 64 + 128);
        assert_eq!(of(&[(0, 32), (1, 64), (2, 128), (0, 128), (0, 128)]), 32 + 64 + 2 * 128);
    }
}
