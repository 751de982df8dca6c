//! Reduces the gradients of units behind their birth.
//!
//! What is reduced when depends on the [`Sync`] of the microbatch.
//!
//! ZeRO-2 and 3: a unit's gradients are written into buckets of a pool, and the reduce-scatter accumulates into the
//! main-gradient shard. Those of two units, or so many elements, are unreduced at a time, whatever their shapes: before
//! a unit's are written, the compute stream waits for the reductions that were launched first. ZeRO-0 and 1: gradients are written (or added) straight into the whole
//! main-gradient buffer, which is reduced in place once, in the last microbatch.

use std::collections::VecDeque;
use std::sync::Arc;

use super::registration::{register, register_outer, settle};
use super::{Moment, Streams};
use crate::buffer::GroupBuffers;
use crate::comm::{Accumulate, CommError, Communicator, Gather, Reduce, Registration};
use crate::device::{Event, Fill, Slice, Stream, cast, fill};
use crate::layout::PoolLimit;
use crate::memory::{Account, Category, Lease, Pool};
use crate::spec::{Dtype, OuterStrategy, Strategy};
use crate::trace::Tracer;

/// The reduction over the outer ranks, once a step, on a stream of its own: it overlaps the inner reductions
/// of the units that follow.
#[derive(Clone)]
pub(crate) struct Outer {
    pub comm: Arc<dyn Communicator>,
    pub stream: Arc<dyn Stream>,
    /// What the outer ranks share.
    pub strategy: OuterStrategy,
}

/// Settings of the pipeline.
#[derive(Clone)]
pub(crate) struct ReduceOptions {
    pub strategy: Strategy,
    /// Dtype of the buckets that travel.
    pub wire: Dtype,
    /// Dtype of the main gradients.
    pub main: Dtype,
    /// Factor of each reduced contribution.
    pub scale: f32,
    /// Units that are unreduced at a time.
    pub depth: usize,
    /// Elements that are unreduced at a time, instead; one unit may be larger.
    pub budget: Option<usize>,
    pub double_buffer: bool,
    pub poison: bool,
    /// The root's buckets are parts that are reduced one by one, not as one.
    pub split_root: bool,
    /// `None` where there is one outer rank.
    pub outer: Option<Outer>,
}

/// Which reductions follow a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sync {
    /// None: whole gradients stay on the rank and the next microbatch adds to them.
    Nothing,
    /// Those that the strategy asks for in every microbatch.
    Microbatch,
    /// All: it is the last microbatch of its step.
    Step,
}

/// Where the gradients of one group are to be written.
#[derive(Clone, Debug)]
pub(crate) struct GradTarget {
    pub group: usize,
    pub bucket: Slice,
    /// Holds nothing yet; otherwise the gradients of earlier microbatches, to be added to.
    pub fresh: bool,
}

/// A unit's gradients of one backward, reduced once `event` is passed, where the model keeps no main gradients.
pub(crate) struct ReducedUnit {
    /// Group and this rank's shard of its gradients.
    pub grads: Vec<(usize, Slice)>,
    pub event: Arc<dyn Event>,
}

struct UnitGrads {
    path: Arc<str>,
    /// Trainable groups.
    groups: Vec<usize>,
    /// Their elements.
    numel: usize,
    open: Option<(Option<Lease>, Vec<GradTarget>)>,
    /// What is open is written to in this backward.
    in_use: bool,
    /// What is open stays so until a unit inside this one has had its backward.
    encloses: bool,
    /// The main gradients hold a contribution of this step.
    accumulated: bool,
    /// ZeRO-0 and 1: they were reduced.
    synced: bool,
    /// They were reduced over the outer ranks.
    outer_synced: bool,
}

/// Buckets whose reduction was launched.
struct Reducing {
    unit: usize,
    lease: Lease,
    /// The reduction is over.
    done: Arc<dyn Event>,
}

pub(crate) struct GradReducePipeline {
    comm: Arc<dyn Communicator>,
    streams: Streams,
    tracer: Arc<Tracer>,
    options: ReduceOptions,
    account: Account,
    pool: Pool,
    /// The units, and after them the parts of the root but the first, which stands for the root.
    units: Vec<UnitGrads>,
    /// Number of units.
    len: usize,
    /// In the order of their launches.
    queue: VecDeque<Reducing>,
    reduced: Vec<ReducedUnit>,
    /// The last reduction among the inner ranks.
    last: Option<Arc<dyn Event>>,
    /// The last one among the outer ranks.
    last_outer: Option<Arc<dyn Event>>,
    held_back: bool,
}

impl GradReducePipeline {
    /// `units`: path and groups of each unit, root first; frozen groups are left out here.
    pub(crate) fn new(
        comm: Arc<dyn Communicator>,
        streams: Streams,
        tracer: Arc<Tracer>,
        account: &Account,
        options: ReduceOptions,
        units: Vec<(Arc<str>, Vec<usize>)>,
        groups: &[GroupBuffers],
    ) -> Self {
        let len = units.len();
        let mut units = units;
        units.iter_mut().for_each(|(_, of)| of.retain(|&group| groups[group].layout.key.requires_grad));
        if options.split_root && units[0].1.len() > 1 {
            let (path, further) = (units[0].0.clone(), units[0].1.split_off(1));
            units.extend(further.into_iter().map(|group| (path.clone(), vec![group])));
        }
        let units: Vec<UnitGrads> = units
            .into_iter()
            .map(|(path, buckets)| UnitGrads {
                path,
                numel: buckets.iter().map(|&group| groups[group].layout.size).sum(),
                groups: buckets,
                open: None,
                in_use: false,
                encloses: false,
                accumulated: false,
                synced: false,
                outer_synced: false,
            })
            .collect();
        let needs_buckets = options.strategy.shards_grads() || options.wire != options.main;
        let shapes = units.iter().map(|unit| {
            let shape = |&group: &usize| (options.wire, groups[group].layout.size);
            if needs_buckets { unit.groups.iter().map(shape).collect() } else { Vec::new() }
        });
        let pool = Pool::new(
            account.clone(),
            Category::ReducePool,
            shapes.collect(),
            |unit| unit == 0 || unit >= len,
            PoolLimit::unreduced(options.depth, options.budget, options.wire),
            options.double_buffer,
        );
        GradReducePipeline {
            comm,
            streams,
            tracer,
            options,
            account: account.clone(),
            pool,
            units,
            len,
            queue: VecDeque::new(),
            reduced: Vec::new(),
            last: None,
            last_outer: None,
            held_back: false,
        }
    }

    /// Sets the factor of contributions that are reduced from now on.
    pub(crate) fn set_scale(&mut self, scale: f32) {
        self.options.scale = scale;
    }

    /// Has the buckets of the pool in memory that stays, registered with the communicator that reduces them, and the main
    /// gradients with that of the outer ranks, if there are any. To be called on all ranks before the first reduction.
    ///
    /// # Errors
    /// As for [`AllGatherPipeline::register_pool`](super::AllGatherPipeline::register_pool).
    pub(crate) fn register_pool(
        &mut self,
        groups: &[GroupBuffers],
        how: Registration,
    ) -> Result<(), CommError> {
        if let Some(outer) = &self.options.outer {
            let grads = groups.iter().filter_map(|group| group.main_grad.as_ref());
            register_outer(&*outer.comm, how, grads.map(|grads| grads.data()))?;
        }
        settle(&mut self.pool, &*self.comm)?;
        register(&self.pool, &*self.comm, how, |_| true)
    }

    /// Where the unit's gradients go, from now until [`Self::reduce`]. Waits, in stream order, until there is room for
    /// them. Units that `is_around` this one have to stay as they are until it has had its backward.
    pub(crate) fn open(
        &mut self,
        groups: &[GroupBuffers],
        unit: usize,
        is_around: impl Fn(usize) -> bool,
    ) -> Result<Vec<GradTarget>, CommError> {
        for (other, state) in self.units[..self.len].iter_mut().enumerate() {
            state.encloses = other != unit && is_around(other);
        }
        let mut targets = Vec::new();
        for part in self.parts(unit) {
            targets.extend(self.open_part(groups, part)?);
        }
        Ok(targets)
    }

    /// The parts of a unit, which are reduced one by one: for the root with several buckets more than the unit itself.
    pub(crate) fn parts(&self, unit: usize) -> Vec<usize> {
        let further = if unit == 0 { self.len..self.units.len() } else { 0..0 };
        std::iter::once(unit).chain(further).collect()
    }

    /// Trainable groups of a part.
    pub(crate) fn groups_of(&self, part: usize) -> &[usize] {
        &self.units[part].groups
    }

    /// [`Self::open`] of one part.
    pub(crate) fn open_part(
        &mut self,
        groups: &[GroupBuffers],
        unit: usize,
    ) -> Result<Vec<GradTarget>, CommError> {
        self.units[unit].in_use = true;
        if let Some((_, targets)) = &self.units[unit].open {
            return Ok(targets.clone());
        }
        let (lease, buckets) = if self.options.strategy.shards_grads() {
            self.take_buckets(unit)?
        } else {
            let whole = |&group: &usize| main_grad(groups, group).data().clone();
            (None, self.units[unit].groups.iter().map(whole).collect())
        };
        let state = &mut self.units[unit];
        let fresh = self.options.strategy.shards_grads() || !state.accumulated;
        let mut targets = Vec::with_capacity(buckets.len());
        for (&group, bucket) in state.groups.iter().zip(buckets) {
            if fresh {
                let compute = &*self.streams.compute;
                if self.options.poison {
                    fill(compute, &bucket, Fill::Poison)?;
                }
                for pad in groups[group].layout.pads() {
                    fill(compute, &bucket.range(pad), Fill::Zero)?;
                }
            }
            targets.push(GradTarget { group, bucket, fresh });
        }
        state.open = Some((lease, targets.clone()));
        Ok(targets)
    }

    /// The unit's gradients are complete for this microbatch: every element of its targets is written.
    /// Reduces them, or keeps them for a later microbatch.
    pub(crate) fn reduce(
        &mut self,
        groups: &[GroupBuffers],
        unit: usize,
        sync: Sync,
        moment: Moment,
    ) -> Result<(), CommError> {
        self.parts(unit).into_iter().try_for_each(|part| self.reduce_part(groups, part, sync, moment))
    }

    /// [`Self::reduce`] of one part.
    pub(crate) fn reduce_part(
        &mut self,
        groups: &[GroupBuffers],
        unit: usize,
        sync: Sync,
        moment: Moment,
    ) -> Result<(), CommError> {
        let state = &mut self.units[unit];
        state.in_use = false;
        let sharded = self.options.strategy.shards_grads();
        if let (true, Sync::Nothing, Some((_, targets))) = (sharded, sync, &mut state.open) {
            targets.iter_mut().for_each(|target| target.fresh = false);
            return Ok(());
        }
        let Some((lease, targets)) = state.open.take() else {
            return Ok(());
        };
        let add = self.units[unit].accumulated;
        self.units[unit].accumulated = true;
        if sharded {
            let mut passing = Vec::new();
            let mut parts = Vec::with_capacity(targets.len());
            for target in targets {
                let layout = &groups[target.group].layout;
                let recv = match &groups[target.group].main_grad {
                    Some(main_grad) => main_grad.shard(),
                    None if add => return Err(self.reduced_twice(unit)),
                    None => {
                        // SAFETY: the reduction below writes it, on its stream; the update that takes it waits for the
                        // event that goes with it.
                        let recv = unsafe {
                            self.account.allocate(Category::MainGrads, self.options.main, layout.shard_len())
                        }?;
                        passing.push((target.group, recv.clone()));
                        recv
                    }
                };
                parts.push(Reduce {
                    recv,
                    send: target.bucket,
                    scale: self.options.scale,
                    accumulate: if add { Accumulate::Add } else { Accumulate::Overwrite },
                });
            }
            self.launch_reduce_scatter(unit, parts, moment)?;
            let event = self.give_back(unit, lease);
            if !passing.is_empty() {
                self.reduced.push(ReducedUnit { grads: passing, event });
            }
        } else if sync == Sync::Step {
            self.reduce_whole(groups, unit, moment)?;
        }
        if sync == Sync::Step { self.reduce_outer(groups, unit, moment) } else { Ok(()) }
    }

    /// End of the last microbatch: reduces the units that have gradients of earlier microbatches only, as far as
    /// they are not reduced yet.
    pub(crate) fn reduce_remaining(
        &mut self,
        groups: &[GroupBuffers],
        moment: Moment,
    ) -> Result<(), CommError> {
        for unit in 0..self.units.len() {
            self.reduce_part(groups, unit, Sync::Step, moment)?;
            let UnitGrads { accumulated, synced, outer_synced, .. } = self.units[unit];
            if accumulated && !synced && !self.options.strategy.shards_grads() {
                self.reduce_whole(groups, unit, moment)?;
            }
            if accumulated && !outer_synced {
                self.reduce_outer(groups, unit, moment)?;
            }
        }
        Ok(())
    }

    /// The gradients of this step were reduced in place, so nothing more can be added: with ZeRO-0 and 1, and
    /// where there are outer ranks.
    pub(crate) fn is_synced(&self) -> bool {
        (0..self.len).any(|unit| self.is_reduced(unit))
    }

    /// The same of one unit.
    pub(crate) fn is_reduced(&self, unit: usize) -> bool {
        self.parts(unit).iter().any(|&part| self.units[part].synced || self.units[part].outer_synced)
    }

    /// The main gradients of the unit hold a contribution of this step.
    pub(crate) fn has_gradient(&self, unit: usize) -> bool {
        self.parts(unit).iter().any(|&part| self.units[part].accumulated)
    }

    /// Units whose targets are written to in this backward.
    pub(crate) fn units_in_use(&self) -> Vec<usize> {
        (0..self.len).filter(|&unit| self.units[unit].in_use).collect()
    }

    /// The stream of the outer ranks' reductions, if there are any.
    #[allow(dead_code, reason = "asked for when a step is captured, with the feature `cuda`")]
    pub(crate) fn outer_stream(&self) -> Option<Arc<dyn Stream>> {
        self.options.outer.as_ref().map(|outer| outer.stream.clone())
    }

    /// What was reduced, where the model keeps no main gradients, and not taken yet.
    pub(crate) fn take_reduced(&mut self) -> Vec<ReducedUnit> {
        std::mem::take(&mut self.reduced)
    }

    fn reduced_twice(&self, unit: usize) -> CommError {
        let message = format!(
            "unit `{}` has gradients twice in one backward, after the optimizer has stepped it: train this model \
             without `step_in_backward`",
            self.units[unit].path
        );
        CommError::Invalid { rank: self.comm.rank(), message }
    }

    /// The compute stream waits for all reductions launched so far.
    pub(crate) fn finish(&mut self) -> Result<(), CommError> {
        let events = [self.last.take(), self.last_outer.take()];
        let waited = events.iter().flatten().try_for_each(|event| self.streams.compute.wait(event));
        self.queue.drain(..).for_each(|reducing| self.pool.release(reducing.lease));
        waited
    }

    /// The main gradients are spent: the next contribution overwrites them.
    pub(crate) fn clear(&mut self) {
        for unit in &mut self.units {
            (unit.accumulated, unit.synced, unit.outer_synced) = (false, false, false);
        }
    }

    /// Gives up targets that an error left open.
    pub(crate) fn abandon(&mut self) {
        self.reduced.clear();
        for unit in 0..self.units.len() {
            self.units[unit].in_use = false;
            if let Some((Some(lease), _)) = self.units[unit].open.take() {
                self.pool.release(lease);
            }
        }
    }

    fn take_buckets(&mut self, unit: usize) -> Result<(Option<Lease>, Vec<Slice>), CommError> {
        self.make_room(unit)?;
        let lease = self.pool.acquire(unit)?;
        let buckets = lease.iter().flat_map(Lease::buffers).cloned().collect();
        Ok((lease, buckets))
    }

    /// Waits, in stream order, for the reductions launched first, until there is room for the unit's gradients. All ranks
    /// have launched them, in this order, before they come here: the wait ends.
    fn make_room(&mut self, unit: usize) -> Result<(), CommError> {
        while !self.has_room(unit) {
            let Some(first) = self.queue.pop_front() else {
                // What is open waits for a later backward.
                self.held_back = true;
                break;
            };
            self.streams.compute.wait(&first.done)?;
            self.pool.release(first.lease);
        }
        Ok(())
    }

    fn has_room(&self, unit: usize) -> bool {
        if self.queue.iter().any(|reducing| reducing.unit == unit) {
            // The root's are reduced still.
            return false;
        }
        if !self.pool.is_shared(unit) {
            return true;
        }
        let open = self.units.iter().enumerate().filter(|&(other, state)| {
            matches!(state.open, Some((Some(_), _))) && other != unit && !state.encloses
        });
        let unreduced = open.map(|(other, _)| other).chain(self.queue.iter().map(|reducing| reducing.unit));
        let unreduced = unreduced.filter(|&other| self.pool.is_shared(other));
        let (units, numel) =
            unreduced.fold((0, 0), |(units, numel), other| (units + 1, numel + self.units[other].numel));
        match self.options.budget {
            _ if units == 0 => true,
            Some(budget) => numel + self.units[unit].numel <= budget,
            None => units < self.options.depth,
        }
    }

    /// The gradients of more units than there is room for had to be held at a time: those of units whose next backward is
    /// still to come.
    pub(crate) fn has_held_back(&self) -> bool {
        self.held_back
    }

    /// The unit's buckets are free again when what was launched last is over.
    fn give_back(&mut self, unit: usize, lease: Option<Lease>) -> Arc<dyn Event> {
        let done = self.streams.reduce.record();
        if let Some(lease) = lease {
            self.queue.push_back(Reducing { unit, lease, done: done.clone() });
        }
        self.last = Some(done.clone());
        done
    }

    fn launch_reduce_scatter(
        &self,
        unit: usize,
        parts: Vec<Reduce>,
        moment: Moment,
    ) -> Result<(), CommError> {
        let (reduce, path) = (&self.streams.reduce, &self.units[unit].path);
        reduce.wait(&self.streams.compute.record())?;
        if parts.is_empty() {
            return Ok(());
        }
        self.tracer.enqueue(&**reduce, "reduce", "reduce-scatter", path, || {
            self.comm.reduce_scatter(&**reduce, moment.tag(path), parts)
        })
    }

    /// Reduces the unit's main gradients over the outer ranks, in place, once the inner ranks have reduced them.
    fn reduce_outer(
        &mut self,
        groups: &[GroupBuffers],
        unit: usize,
        moment: Moment,
    ) -> Result<(), CommError> {
        let Some(Outer { comm, stream, strategy }) = &self.options.outer else { return Ok(()) };
        let state = &mut self.units[unit];
        state.outer_synced = true;
        if state.groups.is_empty() {
            return Ok(());
        }
        stream.wait(&self.streams.reduce.record())?;
        let (path, tag) = (&state.path, moment.tag(&state.path));
        let grads = state.groups.iter().map(|&group| (&groups[group], main_grad(groups, group)));
        match strategy {
            OuterStrategy::NoShard => {
                // Without inner sharding there is no shard, but a whole to be reduced.
                let whole = !self.options.strategy.shards_optim();
                let parts = grads
                    .map(|(_, grad)| (if whole { grad.data().clone() } else { grad.shard() }, 1.0))
                    .collect();
                self.tracer.enqueue(&**stream, "outer reduce", "outer all-reduce", path, || {
                    comm.all_reduce(&**stream, tag, parts)
                })?;
            }
            OuterStrategy::Optim => {
                let parts = grads.map(|(group, grad)| Reduce {
                    send: grad.shard(),
                    recv: grad.part(group.owned.clone()),
                    scale: 1.0,
                    accumulate: Accumulate::Overwrite,
                });
                let parts = parts.collect();
                self.tracer.enqueue(&**stream, "outer reduce", "outer reduce-scatter", path, || {
                    comm.reduce_scatter(&**stream, tag, parts)
                })?;
            }
        }
        self.last_outer = Some(stream.record());
        Ok(())
    }

    /// ZeRO-0 and 1: reduces the whole main-gradient buffers in place.
    fn reduce_whole(
        &mut self,
        groups: &[GroupBuffers],
        unit: usize,
        moment: Moment,
    ) -> Result<(), CommError> {
        self.units[unit].synced = true;
        let unit_groups = self.units[unit].groups.clone();
        if unit_groups.is_empty() {
            return Ok(());
        }
        let whole: Vec<_> = unit_groups.iter().map(|&group| main_grad(groups, group)).collect();
        let narrow = self.options.wire != self.options.main;
        let (lease, wire) = if narrow { self.take_buckets(unit)? } else { (None, Vec::new()) };
        for (grads, bucket) in whole.iter().zip(&wire) {
            cast(&*self.streams.compute, grads.data(), bucket)?;
        }
        let send = |index: usize| wire.get(index).unwrap_or_else(|| whole[index].data()).clone();
        let scale = self.options.scale;
        let replicated = self.options.strategy == Strategy::NoShard;
        if replicated && !narrow {
            let (reduce, path) = (&self.streams.reduce, &self.units[unit].path);
            reduce.wait(&self.streams.compute.record())?;
            let parts = whole.iter().map(|grads| (grads.data().clone(), scale)).collect();
            self.tracer.enqueue(&**reduce, "reduce", "all-reduce", path, || {
                self.comm.all_reduce(&**reduce, moment.tag(path), parts)
            })?;
        } else {
            let parts = whole.iter().enumerate().map(|(index, grads)| Reduce {
                send: send(index),
                recv: grads.shard(),
                scale,
                accumulate: Accumulate::Overwrite,
            });
            self.launch_reduce_scatter(unit, parts.collect(), moment)?;
        }
        if replicated && narrow {
            let (reduce, path) = (&self.streams.reduce, &self.units[unit].path);
            let parts = whole.iter().map(|grads| Gather { send: grads.shard(), recv: grads.data().clone() });
            self.tracer.enqueue(&**reduce, "reduce", "all-gather gradients", path, || {
                self.comm.all_gather(&**reduce, moment.tag(path), parts.collect())
            })?;
        }
        self.give_back(unit, lease);
        Ok(())
    }
}

fn main_grad(groups: &[GroupBuffers], group: usize) -> &crate::buffer::DataParallelBuffer {
    groups[group].main_grad.as_ref().expect("a trainable group has main gradients")
}
