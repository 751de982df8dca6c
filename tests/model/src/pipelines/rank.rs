//! One rank that trains: the calls that the engine makes, in its order, and checks on the compute stream.

use std::sync::Arc;

use super::setting::{Mode, Setting, UNITS, Update, Use};
use crate::buffer::{BucketBuffers, Placement};
use crate::comm::{CommError, Communicator, Phase, Registration};
use crate::device::{Slice, Stream, cast};
use crate::ids::{BucketId, Id, ParamId, Table, UnitId};
use crate::layout::{LayoutOptions, MemoryPlan, ModelLayout, Schedule, ShardAlignment, UnitLayout, UnitSpec};
use crate::memory::{Account, Category};
use crate::schedule::{
    AllGatherPipeline, Change, GatherOptions, GradReducePipeline, Moment, Outer, Pass, Prefetch,
    ReduceOptions, Reshard, Resources, Streams, Sync, Unit, Units,
};
use crate::spec::{Dtype, GroupKey, MixedPrecision, OuterStrategy, ParamSpec, ReshardAfterForward, Strategy};
use crate::trace::Tracer;

const ROOT: usize = 0;

/// Where a rank's memory and streams are.
pub(super) trait Place {
    /// Allocates the rank's buffers.
    fn account(&self) -> Account;

    /// The compute stream: of the rank's own thread, if it need not be `apart`.
    fn compute(&self, apart: bool) -> Arc<dyn Stream>;

    /// A stream beside it.
    fn side(&self, name: &str) -> Result<Arc<dyn Stream>, CommError>;

    /// The compute stream calls `check` with the values of `slice`.
    fn read(&self, compute: &dyn Stream, slice: Slice, check: Check) -> Result<(), CommError>;

    /// The compute stream calls `update` with the values of `slice`, to be changed, which are f32 or rounded to bf16.
    fn update(&self, compute: &dyn Stream, slice: Slice, update: Change32) -> Result<(), CommError>;
}

/// Panics if the values are not the expected ones.
pub(super) type Check = Box<dyn FnOnce(&[f32]) + Send>;
pub(super) type Change32 = Box<dyn FnOnce(&mut [f32]) + Send>;

pub(super) struct Rank<P> {
    place: P,
    setting: Setting,
    rank: usize,
    layout: ModelLayout,
    resources: Arc<Resources>,
    units: Units,
    gather: AllGatherPipeline,
    reduce: GradReducePipeline,
    /// Of the weights of each bucket.
    versions: Table<BucketId, usize>,
    step: u64,
    fuse: Option<Fuse<P>>,
}

/// How a rank fails.
pub(super) struct Fuse<P> {
    /// Uses of units until then.
    pub uses: usize,
    /// Called in place of the next use.
    pub blow: fn(&P) -> CommError,
}

impl<P> Fuse<P> {
    /// Fails with an error.
    pub(super) fn new(uses: usize) -> Fuse<P> {
        Fuse { uses, blow: |_| CommError::Invalid { rank: 0, message: "planned".to_owned() } }
    }
}

/// Where the gradients of a bucket go.
struct Target {
    bucket: BucketId,
    slice: Slice,
    fresh: bool,
}

/// The weight that element `element` of a group's bucket has, exact in bf16.
fn weight(group: usize, version: usize, element: usize) -> f32 {
    ((29 * group + 71 * version + 3 * element) % 251) as f32
}

/// What a rank adds to an element's gradient in each use of its unit in a microbatch. Sums of all are exact in
/// bf16.
fn contribution(rank: usize, microbatch: usize, element: usize) -> f32 {
    (rank + 1 + microbatch + element % 3) as f32
}

fn param(setting: &Setting, unit: usize, requires_grad: bool) -> ParamSpec {
    let dtype = setting.weights;
    ParamSpec {
        name: format!("{unit}.{requires_grad}"),
        shape: vec![if setting.unequal { 5 + 40 * unit } else { 5 }],
        key: GroupKey { dtype, expert: false, requires_grad, unit },
        no_decay: false,
        tp: None,
        tp_parts: 1,
        shared: false,
        aliases: Vec::new(),
        fused: Vec::new(),
    }
}

fn layout(setting: &Setting) -> ModelLayout {
    let params = (0..UNITS).flat_map(|unit| {
        let frozen = (setting.frozen && unit > 0).then(|| param(setting, unit, false));
        std::iter::once(param(setting, unit, true)).chain(frozen)
    });
    let units: Vec<UnitSpec> = (0..UNITS)
        .map(|unit| UnitSpec::new(if unit == 0 { String::new() } else { unit.to_string() }))
        .collect();
    let further = ParamSpec { name: "further".to_owned(), ..param(setting, ROOT, true) };
    let params = params.chain(setting.split_root.then_some(further));
    let bucket_size = setting.split_root.then_some(1);
    let outer = if setting.outer_strategy == OuterStrategy::Optim { setting.outer } else { 1 };
    let options =
        LayoutOptions { ranks: setting.inner, outer, alignment: ShardAlignment::Element, bucket_size };
    ModelLayout::build(params.collect(), &units, &options).expect("a valid model")
}

impl<P: Place> Rank<P> {
    pub(super) fn new(
        place: P,
        setting: Setting,
        comm: &dyn Communicator,
        fuse: Option<Fuse<P>>,
    ) -> Result<Self, CommError> {
        let rank = comm.rank();
        let (outer_rank, inner_rank) = (rank / setting.inner, rank % setting.inner);
        let inner: Vec<usize> = (0..setting.inner).map(|i| outer_rank * setting.inner + i).collect();
        let outer: Vec<usize> = (0..setting.outer).map(|i| i * setting.inner + inner_rank).collect();
        let (inner, outer) = (comm.split("inner", &inner)?, comm.split("outer", &outer)?);
        // Two neighbours, or the one there is.
        let first = inner_rank / 2 * 2;
        let neighbours: Vec<usize> = (first..(first + 2).min(setting.inner)).collect();
        let neighbours = inner.split("neighbours", &neighbours)?;

        let layout = layout(&setting);
        let account = place.account();
        let placement = Placement { strategy: setting.strategy, rank: inner_rank, outer_rank };
        // So that it can be registered, if the ranks are joined by NCCL.
        let persistent = match outer.registrable() {
            Some(memory) if setting.outer > 1 => account.in_memory(memory),
            _ => account.clone(),
        };
        let buckets: Table<BucketId, BucketBuffers> = layout
            .buckets
            .iter()
            .map(|bucket| {
                // SAFETY: what drives the pipelines here, the checker and the fake driver, reports uses that are not ordered.
                unsafe {
                    BucketBuffers::allocate(
                        &persistent,
                        bucket.clone(),
                        placement,
                        &MixedPrecision::F32,
                        true,
                    )
                }
            })
            .collect::<Result<_, _>>()?;
        let compute = place.compute(setting.device);
        let streams = Streams { compute, gather: place.side("gather")?, reduce: place.side("reduce")? };
        let reshard = |unit: usize| match setting.reshard_of(unit) {
            _ if !setting.strategy.shards_params() || unit == ROOT => Reshard::Always,
            Mode::Never => Reshard::Never,
            Mode::Within => Reshard::Within(neighbours.clone()),
            Mode::Always | Mode::Mixed => Reshard::Always,
        };
        let unit = |unit: &UnitLayout| {
            let layouts = || unit.buckets.iter().map(|&bucket| &layout.buckets[bucket]);
            Unit {
                path: unit.path.as_str().into(),
                buckets: unit.buckets.iter().copied().map(BucketId::new).collect(),
                params: layouts()
                    .flat_map(|layout| &layout.items)
                    .map(|item| ParamId::new(item.param))
                    .collect(),
                numel: layouts().map(|layout| layout.size).sum(),
                reshard: ReshardAfterForward::Always,
            }
        };
        let units = layout.units.iter().map(unit).collect();
        let resources = Arc::new(Resources { streams, account, tracer: Tracer::new(false), units, buckets });
        let (gather, weights) = AllGatherPipeline::new(
            inner.duplicate("gather"),
            GatherOptions {
                strategy: setting.strategy,
                prefetch: Prefetch { forward: setting.prefetch, backward: setting.prefetch },
                budget: setting.budget,
                depth: setting.depth,
                double_buffer: setting.double_buffer,
                poison: setting.poison,
                split_root: setting.split_root,
                outer: (setting.outer_strategy == OuterStrategy::Optim).then(|| outer.duplicate("gather")),
            },
            &resources,
            (0..layout.units.len()).map(reshard).collect(),
        );
        let outer_reduction = || -> Result<Outer, CommError> {
            let (comm, stream) = (outer.duplicate("reduce"), place.side("outer-reduce")?);
            Ok(Outer { comm, stream, strategy: setting.outer_strategy })
        };
        let (reduce, grads) = GradReducePipeline::new(
            inner.duplicate("reduce"),
            ReduceOptions {
                strategy: setting.strategy,
                wire: setting.wire,
                main: Dtype::F32,
                scale: 1.0,
                depth: setting.depth,
                budget: setting.reduce_budget,
                double_buffer: setting.double_buffer,
                poison: setting.poison,
                split_root: setting.split_root,
                outer: (setting.outer > 1).then(outer_reduction).transpose()?,
            },
            &resources,
        );
        let units = Units::at_rest(weights, grads);
        let versions = vec![0; layout.buckets.len()].into();
        Ok(Rank { place, setting, rank, layout, resources, units, gather, reduce, versions, step: 0, fuse })
    }

    /// Registers what both pools have.
    pub(super) fn register(&mut self, how: Registration) -> Result<(), CommError> {
        self.gather.register_pool(&self.units, how)?;
        self.reduce.register_pool(how)
    }

    /// Two steps, and what follows them.
    pub(super) fn train(&mut self) -> Result<(), CommError> {
        self.update(Update::LoadAll)?;
        for (index, forward) in self.setting.forwards.into_iter().enumerate() {
            if self.setting.evaluate {
                self.forward_pass(forward, false)?;
                self.gather.reset(&mut self.units)?;
            }
            let cut = self.setting.cut.filter(|_| index == 0);
            let mut microbatches = self.setting.microbatches.iter().enumerate();
            let complete = microbatches.try_fold(true, |complete, (microbatch, &sync)| {
                Ok(complete && self.microbatch(forward, microbatch, sync, cut)?)
            })?;
            if complete {
                self.finish_gradients(forward)?;
                self.update(self.setting.updates[index])?;
                self.reduce.clear(&mut self.units);
                self.step += 1;
            }
        }
        for stream in {
            let Streams { compute, gather, reduce } = &self.resources.streams;
            [gather, reduce, compute]
        } {
            stream.record().synchronize()?;
        }
        self.check_memory();
        Ok(())
    }

    /// The pools have never held more than the plan says, where the host follows the compute stream.
    fn check_memory(&self) {
        let Setting { strategy, prefetch, budget, reduce_budget, inner, .. } = self.setting;
        // One rank's whole weights are its shard: the engine gathers none.
        if self.setting.device || inner == 1 {
            return;
        }
        let schedule = Schedule {
            prefetch,
            gather_budget: budget,
            reduce_budget,
            no_sync: self.reduce.held_back || self.setting.microbatches.contains(&Sync::Nothing),
            ..Schedule::DEFAULT
        };
        let precision = MixedPrecision { reduce: self.setting.wire, ..MixedPrecision::F32 };
        let reshard = |unit: usize| {
            Some(match self.setting.reshard_of(unit) {
                Mode::Never => ReshardAfterForward::Never,
                Mode::Within => ReshardAfterForward::Ranks(2),
                Mode::Always | Mode::Mixed => ReshardAfterForward::Always,
            })
        };
        let plan = MemoryPlan::scheduled(&self.layout, strategy, &precision, &schedule, reshard);
        // Units run inside others that the layout does not know to be around them.
        let (mut gathered, mut unreduced) = (0, 0);
        let depth = self.setting.forwards.iter().flat_map(|uses| uses.iter()).map(Use::depth).max();
        let bytes = |trainable: bool, size: usize| {
            let largest = |unit: &UnitLayout| -> usize {
                let buckets = unit.buckets.iter().map(|&bucket| &self.layout.buckets[bucket]);
                buckets
                    .filter(|bucket| !trainable || bucket.key.requires_grad)
                    .map(|bucket| bucket.size)
                    .sum()
            };
            (size * self.layout.units[1..].iter().map(largest).max().unwrap_or(0)) as u64
        };
        if strategy.shards_params() {
            gathered = depth.unwrap_or(0) as u64 * bytes(false, self.setting.weights.size());
        }
        if strategy.shards_grads() {
            unreduced = depth.unwrap_or(0) as u64 * bytes(true, self.setting.wire.size());
        }
        for (category, most) in [
            (Category::GatherPool, plan.gather_pool + gathered),
            (Category::ReducePool, plan.reduce_pool + unreduced),
        ] {
            let peak = self.resources.account.usage(category).peak as u64;
            assert!(peak <= most, "{category:?}: {peak} bytes, more than {most}");
        }
    }

    /// Forward and backward; false if they were cut short.
    fn microbatch(
        &mut self,
        forward: &[Use],
        microbatch: usize,
        sync: Sync,
        cut: Option<usize>,
    ) -> Result<bool, CommError> {
        let whole_root = self.forward_pass(forward, true)?;
        if self.setting.evaluate {
            // The root is whole already, and stays so for the backward.
            self.forward_pass(forward, false)?;
            self.gather.reset(&mut self.units)?;
        }
        if self.setting.settle {
            self.reduce.finish()?;
            self.gather.reset(&mut self.units)?;
        }
        self.gather.backward_order.begin();
        let root = self.open(ROOT)?;
        self.add_gradients(root, microbatch, &mut false)?;
        let mut pending = [0; UNITS];
        count(forward, &mut |unit| pending[unit] += 1);
        let mut written = [false; UNITS];
        for (index, at) in forward.iter().rev().enumerate() {
            if cut == Some(index) {
                self.give_up()?;
                return Ok(false);
            }
            self.backward(at, microbatch, sync, &mut pending, &mut written)?;
            if index == 0 && self.setting.strategy.shards_grads() && sync != Sync::Nothing {
                // What is complete of the root, as the outer ranks' reduction comes at the end.
                let moment = self.moment(Phase::Backward);
                for part in 1..self.units[UnitId::ROOT].grads.parts.len() {
                    let (units, sync) = (&mut self.units, Sync::Microbatch);
                    self.reduce.reduce_part(units, UnitId::ROOT, part, sync, moment)?;
                }
            }
        }
        self.check_weights(ROOT, &whole_root)?;
        self.reduce_unit(ROOT, sync)?;
        if sync == Sync::Step {
            self.reduce_remaining(Phase::Backward)?;
        }
        self.gather.backward_order.end();
        self.release(ROOT)?;
        Ok(true)
    }

    /// What the engine does when a step is reset in the middle of a backward.
    fn give_up(&mut self) -> Result<(), CommError> {
        self.reduce.abandon(&mut self.units);
        self.release(ROOT)?;
        self.reduce.finish()?;
        self.reduce.clear(&mut self.units);
        self.gather.expect_nothing(&mut self.units);
        self.gather.reset(&mut self.units)
    }

    /// A forward. Returns the root's weights, which stay whole after one of training.
    fn forward_pass(&mut self, forward: &[Use], training: bool) -> Result<Vec<Slice>, CommError> {
        if self.setting.unshard {
            let (unit, moment) = (UnitId::new(forward[0].unit), self.moment(Phase::Forward));
            self.gather.start(&mut self.units, unit, moment)?;
        }
        self.gather.forward_order.begin();
        let root = self.acquire(ROOT, Some(Pass::Forward))?;
        for at in forward {
            self.forward(at, Some(Pass::Forward), training)?;
        }
        self.check_weights(ROOT, &root)?;
        self.gather.forward_order.end();
        if !training {
            self.release(ROOT)?;
        }
        Ok(root)
    }

    fn forward(&mut self, at: &Use, pass: Option<Pass>, training: bool) -> Result<(), CommError> {
        let full = self.acquire(at.unit, pass)?;
        for inner in at.inner {
            self.forward(inner, pass, training)?;
        }
        // Gathers of other units were launched meanwhile.
        self.check_weights(at.unit, &full)?;
        if training && pass.is_some() {
            self.units[UnitId::new(at.unit)].weights.expected = true;
        }
        self.release(at.unit)
    }

    fn backward(
        &mut self,
        at: &Use,
        microbatch: usize,
        sync: Sync,
        pending: &mut [usize; UNITS],
        written: &mut [bool; UNITS],
    ) -> Result<(), CommError> {
        if self.skips(at.unit, microbatch) {
            return Ok(());
        }
        let full = self.acquire(at.unit, Some(Pass::Backward))?;
        if self.setting.recompute {
            for inner in at.inner {
                self.forward(inner, None, true)?;
            }
        }
        let targets = self.open(at.unit)?;
        for inner in at.inner.iter().rev() {
            self.backward(inner, microbatch, sync, pending, written)?;
        }
        self.add_gradients(targets, microbatch, &mut written[at.unit])?;
        self.check_weights(at.unit, &full)?;
        self.release(at.unit)?;
        pending[at.unit] -= 1;
        if pending[at.unit] == 0 {
            self.reduce_unit(at.unit, sync)?;
        }
        Ok(())
    }

    fn skips(&self, unit: usize, microbatch: usize) -> bool {
        microbatch == 0 && self.setting.skipped == Some(unit)
    }

    /// The unit's weights, checked.
    fn acquire(&mut self, unit: usize, pass: Option<Pass>) -> Result<Vec<Slice>, CommError> {
        if let Some(fuse) = &mut self.fuse {
            if fuse.uses == 0 {
                return Err((fuse.blow)(&self.place));
            }
            fuse.uses -= 1;
        }
        let phase = if pass == Some(Pass::Backward) { Phase::Backward } else { Phase::Forward };
        let (id, moment) = (UnitId::new(unit), self.moment(phase));
        self.gather.acquire(&mut self.units, id, pass, moment)?;
        let full = self.units[id].weights.full().to_vec();
        self.check_weights(unit, &full)?;
        Ok(full)
    }

    fn release(&mut self, unit: usize) -> Result<(), CommError> {
        self.gather.release(&mut self.units, UnitId::new(unit))
    }

    fn reduce_unit(&mut self, unit: usize, sync: Sync) -> Result<(), CommError> {
        let moment = self.moment(Phase::Backward);
        self.reduce.reduce(&mut self.units, UnitId::new(unit), sync, moment)
    }

    fn reduce_remaining(&mut self, phase: Phase) -> Result<(), CommError> {
        let moment = self.moment(phase);
        self.reduce.reduce_remaining(&mut self.units, moment)
    }

    /// The compute stream reads what was handed out: the unit's present weights.
    fn check_weights(&self, unit: usize, full: &[Slice]) -> Result<(), CommError> {
        let buckets = &self.resources.units[UnitId::new(unit)].buckets;
        assert_eq!(full.len(), buckets.len());
        for (&bucket, slice) in buckets.iter().zip(full) {
            let (rank, version, group) = (self.rank, self.versions[bucket], bucket.index());
            let check = move |values: &[f32]| {
                for (element, &value) in values.iter().enumerate() {
                    let expected = weight(group, version, element);
                    assert_eq!(
                        value, expected,
                        "rank {rank}: weight {element} of group {group}, unit {unit}"
                    );
                }
            };
            self.place.read(&*self.resources.streams.compute, slice.clone(), Box::new(check))?;
        }
        Ok(())
    }

    fn open(&mut self, unit: usize) -> Result<Vec<Target>, CommError> {
        let unit = UnitId::new(unit);
        self.reduce.open(&mut self.units, unit)?;
        let parts = &self.units[unit].grads.parts;
        let buckets = parts.iter().flat_map(|part| part.buckets.iter().map(move |&bucket| (part, bucket)));
        Ok(buckets
            .map(|(part, bucket)| {
                let (slice, fresh) = part.target(bucket).expect("it is open");
                Target { bucket, slice: slice.clone(), fresh }
            })
            .collect())
    }

    /// The compute stream writes a use's gradients into the targets, or adds them.
    fn add_gradients(
        &self,
        targets: Vec<Target>,
        microbatch: usize,
        written: &mut bool,
    ) -> Result<(), CommError> {
        let rank = self.rank;
        for target in targets {
            let overwrite = target.fresh && !*written;
            for item in &self.resources.buckets[target.bucket].layout.items {
                let elements = item.range();
                let slice = target.slice.range(elements.clone());
                let update = move |values: &mut [f32]| {
                    for (value, element) in values.iter_mut().zip(elements) {
                        let new = contribution(rank, microbatch, element);
                        *value = if overwrite { new } else { *value + new };
                    }
                };
                self.place.update(&*self.resources.streams.compute, slice, Box::new(update))?;
            }
        }
        *written = true;
        Ok(())
    }

    /// Before the optimizer's step: all gradients are reduced, and exact.
    fn finish_gradients(&mut self, forward: &[Use]) -> Result<(), CommError> {
        self.reduce_remaining(Phase::Optimizer)?;
        self.reduce.finish()?;
        self.gather.reset(&mut self.units)?;
        for (bucket, buffers) in self.resources.buckets.entries() {
            let group = bucket.index();
            let (Some(grads), unit) = (&buffers.main_grad, buffers.layout.key.unit) else { continue };
            if !self.units[UnitId::new(unit)].grads.has_gradient() {
                continue;
            }
            let mut uses = usize::from(unit == ROOT);
            count(forward, &mut |used| uses += usize::from(used == unit));
            let microbatches: Vec<usize> =
                (0..self.setting.microbatches.len()).filter(|&m| !self.skips(unit, m)).collect();
            let ranks = self.setting.ranks();
            let shares = self.setting.outer_strategy == OuterStrategy::Optim;
            let range = match self.setting.strategy {
                Strategy::NoShard => grads.held(),
                _ if shares => buffers.owned.clone(),
                _ => buffers.shard.clone(),
            };
            let slice = grads.part(range.clone());
            let items = buffers.layout.items.clone();
            let check = move |values: &[f32]| {
                for (element, &value) in range.zip(values) {
                    let all = microbatches.iter().flat_map(|&m| (0..ranks).map(move |rank| (rank, m)));
                    let sum: f32 = all.map(|(rank, m)| uses as f32 * contribution(rank, m, element)).sum();
                    let is_item = items.iter().any(|item| item.range().contains(&element));
                    let expected = if is_item { sum } else { 0.0 };
                    assert_eq!(value, expected, "gradient {element} of group {group}");
                }
            };
            self.place.read(&*self.resources.streams.compute, slice, Box::new(check))?;
        }
        Ok(())
    }

    /// Writes new weights, and tells the pipeline.
    fn update(&mut self, update: Update) -> Result<(), CommError> {
        let unit = match update {
            Update::Nothing => return Ok(()),
            Update::LoadUnit(unit) => Some(unit),
            Update::Step | Update::LoadAll => None,
        };
        for (bucket, buffers) in self.resources.buckets.entries() {
            let group = bucket.index();
            let key = buffers.layout.key;
            if unit.is_some_and(|unit| unit != key.unit) || (update == Update::Step && !key.requires_grad) {
                continue;
            }
            self.versions[bucket] += 1;
            let range = match update {
                Update::Step => buffers.owned.clone(),
                _ if !self.setting.strategy.shards_optim() => buffers.model_weight.held(),
                _ => buffers.shard.clone(),
            };
            let (model, version) = (buffers.model_weight.part(range.clone()), self.versions[bucket]);
            let main = buffers.main_weight.as_ref().filter(|_| update == Update::Step);
            let main = main.map(|main| main.part(range.clone()));
            let set = move |values: &mut [f32]| {
                for (value, element) in values.iter_mut().zip(range) {
                    *value = weight(group, version, element);
                }
            };
            let compute = &*self.resources.streams.compute;
            self.place.update(compute, main.as_ref().unwrap_or(&model).clone(), Box::new(set))?;
            if let Some(main) = main {
                cast(compute, &main, &model)?;
            }
        }
        let change =
            if update == Update::Step { Change::Step } else { Change::Loaded(unit.map(UnitId::new)) };
        self.gather.give_up(&mut self.units, change)
    }

    fn moment(&self, phase: Phase) -> Moment {
        Moment { phase, step: self.step }
    }
}

/// Calls `visit` with the unit of every use.
fn count(uses: &[Use], visit: &mut impl FnMut(usize)) {
    for at in uses {
        visit(at.unit);
        count(at.inner, visit);
    }
}
