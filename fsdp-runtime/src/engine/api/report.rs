//! What a rank holds and has moved, and what the layout says it must.

use serde::Serialize;

use crate::buffer::{BucketBuffers, intersection};
use crate::comm::CommCounter;
use crate::engine::schedule::Unit;
use crate::engine::{BucketId, Ctx, Fsdp, Id, UnitId};
use crate::layout::{Item, MemoryPlan, Schedule};
use crate::memory::{Category, Usage};
use crate::spec::ReshardAfterForward;
use crate::trace::Span;

/// One unit, for tables.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UnitReport {
    /// Path; `(root)` for the root.
    pub unit: String,
    /// Physical parameters.
    pub params: usize,
    /// Elements, padding not counted.
    pub numel: usize,
    /// Flat buffers.
    pub buckets: usize,
    /// Elements of padding.
    pub padding: usize,
    /// Bytes of model weights that this rank keeps.
    pub shard_bytes: usize,
    /// Bytes of the whole weights, as gathered.
    pub gathered_bytes: usize,
}

/// Bytes of one category: held, and foretold by the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryReport {
    /// What was counted.
    #[serde(flatten)]
    pub usage: Usage,
    /// What the layout says: exact for what persists (an average of the weights, if there is one), an upper
    /// bound for the pools and for a step that needs whole parameters.
    pub formula: u64,
}

/// Traffic of one kind of collective.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TrafficReport {
    /// `all-gather`, `reduce-scatter`, ...
    pub operation: &'static str,
    /// Launches and bytes.
    #[serde(flatten)]
    pub counter: CommCounter,
}

impl<M> Fsdp<M> {
    /// The model's units, root first. Local.
    pub fn units(&self) -> Vec<UnitReport> {
        let ctx = &self.engine().ctx;
        let report = |(id, unit): (UnitId, &Unit)| {
            let buckets = || unit.buckets.iter().map(|&bucket| &ctx.resources.buckets[bucket]);
            UnitReport {
                unit: ctx.unit_name(id).to_string(),
                params: unit.params.len(),
                numel: buckets().map(|bucket| bucket.layout.numel()).sum(),
                buckets: unit.buckets.len(),
                padding: buckets().map(|bucket| bucket.layout.padding()).sum(),
                shard_bytes: buckets().map(|bucket| bucket.model_weight.data().bytes()).sum(),
                gathered_bytes: buckets().map(|bucket| bucket.layout.bytes()).sum(),
            }
        };
        let units = ctx.resources.units.entries().map(report);
        units.filter(|unit| unit.params > 0 || unit.unit == ctx.unit_name(UnitId::ROOT)).collect()
    }

    /// What the layout says this rank holds, with the most units ahead that [`Fsdp::set_prefetch`] has asked for, with
    /// [`Fsdp::no_sync`] if it was used, and as with it if units had to wait for a second backward (several forwards before
    /// their backwards, units called again later). With `step_in_backward` the
    /// main gradients are those of one unit, the largest.
    pub fn memory_plan(&self) -> MemoryPlan {
        let engine = self.engine();
        let Ctx { layout, config, resources, .. } = &engine.ctx;
        let (strategy, precision) = (config.strategy, &config.precision);
        let schedule = {
            let step = engine.step();
            Schedule {
                prefetch: step.gather.deepest,
                gather_budget: config.gather_budget,
                reduce_budget: config.reduce_budget,
                no_sync: step.kept_gradients || step.reduce.held_back,
                registered: config.registration.is_some(),
                ..Schedule::DEFAULT
            }
        };
        let plan_with = |reshard: &dyn Fn(UnitId) -> ReshardAfterForward| {
            let reshard = |unit: usize| Some(reshard(UnitId::new(unit)));
            MemoryPlan::scheduled(layout, strategy, precision, &schedule, reshard)
        };
        let made = |unit: UnitId| resources.units[unit].reshard;
        let mut plan = plan_with(&made);
        // What units were told later: those that have kept their weights at any time, all at once.
        let step = engine.step();
        let was_kept = |unit: UnitId| step.units[unit].weights.was_kept;
        let kept = plan_with(&|unit| if was_kept(unit) { ReshardAfterForward::Never } else { made(unit) });
        plan.gather_pool = plan.gather_pool.max(kept.gather_pool);
        if config.step_in_backward {
            let trainable = |&&bucket: &&BucketId| resources.buckets[bucket].layout.key.requires_grad;
            let size = precision.main_grads.size();
            let shard = |&bucket: &BucketId| (size * resources.buckets[bucket].layout.shard_len()) as u64;
            let unit = |unit: &Unit| unit.buckets.iter().filter(trainable).map(shard).sum();
            plan.main_grads = resources.units.iter().map(unit).max().unwrap_or(0);
        }
        plan
    }

    /// Bytes by category, next to the layout's figure for an optimizer of `state_buffers` FP32 buffers
    /// (AdamW: 2); an [`OwnerOptimizer`](crate::engine::OwnerOptimizer)'s are not a multiple of the shard. Averages of
    /// the weights, steps that need whole parameters and what communicators sum in are listed if there have been any; of the
    /// last the figure is its own peak. Local.
    pub fn memory(&self, state_buffers: usize) -> Vec<MemoryReport> {
        let plan = self.memory_plan();
        let buckets = self.layout().buckets.iter().filter(|bucket| bucket.key.requires_grad);
        // f32 weights and gradients of one bucket.
        let owner_step = 2 * 4 * buckets.map(|bucket| bucket.size as u64).max().unwrap_or(0);
        // What the rank writes, with an average of the weights if there is one.
        let averages = usize::from(self.engine().ctx.account().usage(Category::WeightAverage).peak > 0);
        let snapshot = |state_buffers: usize| {
            let bytes = |bucket: &BucketBuffers| {
                let (saved, weights) = (self.engine().ctx.saved_range(bucket), bucket.optimizer_weight());
                let saved = |item: &Item| intersection(&item.range(), &saved).len();
                let numel: usize = bucket.layout.items.iter().map(saved).sum();
                let states = if bucket.layout.key.requires_grad { 4 * (state_buffers + averages) } else { 0 };
                (numel * (weights.data().dtype().size() + states)) as u64
            };
            self.engine().ctx.resources.buckets.iter().map(bytes).sum()
        };
        let report = |usage: Usage| {
            let formula = match usage.category {
                Category::ModelWeights => plan.model_weights,
                Category::MainWeights => plan.main_weights,
                Category::MainGrads => plan.main_grads,
                Category::OptimizerState => plan.optimizer_state * state_buffers as u64,
                Category::GatherPool => plan.gather_pool,
                Category::ReducePool => plan.reduce_pool,
                Category::OwnerStep => owner_step,
                Category::WeightAverage => plan.optimizer_state,
                Category::Snapshot => snapshot(state_buffers),
                // How they sum is theirs to choose.
                Category::Collectives => usage.peak as u64,
            };
            MemoryReport { usage, formula }
        };
        let listed = |usage: &Usage| {
            let optional = matches!(
                usage.category,
                Category::OwnerStep | Category::WeightAverage | Category::Snapshot | Category::Collectives
            );
            !optional || usage.peak > 0
        };
        self.engine().ctx.account().report().into_iter().filter(listed).map(report).collect()
    }

    /// Bytes moved so far by this rank's collectives, of all its groups. Local.
    pub fn traffic(&self) -> Vec<TrafficReport> {
        let counters = self.engine().ctx.comm.counters();
        counters.into_iter().map(|(operation, counter)| TrafficReport { operation, counter }).collect()
    }

    /// The trace so far; empty unless the configuration asks for one. Local.
    pub fn trace(&self) -> Vec<Span> {
        self.engine().ctx.resources.tracer.spans()
    }

    /// Forgets the trace so far. Local.
    pub fn clear_trace(&self) {
        self.engine().ctx.resources.tracer.clear();
    }
}
