//! Reduces the gradients of units behind their birth.
//!
//! What is reduced when depends on the [`Sync`] of the microbatch.
//!
//! ZeRO-2 and 3: a unit's gradients are written into buckets of a pool, and the reduce-scatter accumulates into the
//! main-gradient shard. The pool has room for the gradients of two units, whatever their shapes, or for a budget of
//! elements: before a unit's are written, the compute stream waits for the oldest reductions until there is room.
//!
//! ZeRO-0 and 1: gradients are written (or added) straight into the whole main-gradient buffer. It is reduced in place once,
//! in the last microbatch, when the unit has had its backward there.

use std::collections::VecDeque;
use std::sync::Arc;

use super::super::ids::{BucketId, UnitId};
use super::grads::{Buckets, Main};
use super::registration::{register, settle};
use super::{GradPart, Grads, Moment, Resources, Unit, Units};
use crate::comm::{Accumulate, CommError, Communicator, Reduce, Registration};
use crate::device::{Event, Slice, Stream, cast};
use crate::layout::PoolLimit;
use crate::memory::{Category, Lease, Pool};
use crate::spec::{Dtype, OuterStrategy, Strategy};

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

/// A unit's gradients of one backward, reduced once `event` is passed, where the model keeps no main gradients.
pub(crate) struct ReducedUnit {
    /// This rank's shard of the gradients of each bucket.
    pub grads: Vec<(BucketId, Slice)>,
    pub event: Arc<dyn Event>,
}

/// Buckets whose reduction was launched.
struct Reducing {
    /// The part, and its elements.
    in_pool: usize,
    numel: usize,
    lease: Lease,
    /// The reduction is over.
    done: Arc<dyn Event>,
}

pub(crate) struct GradReducePipeline {
    comm: Arc<dyn Communicator>,
    resources: Arc<Resources>,
    options: ReduceOptions,
    pool: Pool,
    /// In the order of their launches.
    queue: VecDeque<Reducing>,
    /// What was reduced, where the model keeps no main gradients, and is not taken yet.
    pub(crate) reduced: Vec<ReducedUnit>,
    /// The last reduction among the inner ranks.
    last: Option<Arc<dyn Event>>,
    /// The last one among the outer ranks.
    last_outer: Option<Arc<dyn Event>>,
    /// The gradients of more units than there is room for had to be held at a time: those of units whose next backward is
    /// still to come.
    pub(crate) held_back: bool,
}

impl GradReducePipeline {
    /// The schedule, and the gradients of each unit; those of frozen buckets are left out.
    pub(crate) fn new(
        comm: Arc<dyn Communicator>,
        options: ReduceOptions,
        resources: &Arc<Resources>,
    ) -> (Self, Vec<Grads>) {
        let trainable = |bucket: &BucketId| resources.buckets[*bucket].layout.key.requires_grad;
        let size = |bucket: &BucketId| resources.buckets[*bucket].layout.size;
        let numel = |buckets: &[BucketId]| buckets.iter().map(size).sum();
        let buckets = |unit: &Unit| unit.buckets.iter().copied().filter(trainable).collect::<Vec<_>>();
        let mut of_units: Vec<Vec<BucketId>> = resources.units.iter().map(buckets).collect();
        let split = options.split_root && !of_units[0].is_empty();
        let further = if split { of_units[0].split_off(1) } else { Vec::new() };
        // The pool knows the first part of each unit by the unit, and the others of the root after them.
        let len = of_units.len();
        let in_pool = of_units.iter().cloned().chain(further.iter().map(|&bucket| vec![bucket]));
        let needs_buckets = options.strategy.shards_grads() || options.wire != options.main;
        let shapes = in_pool.map(|buckets| match needs_buckets {
            true => buckets.iter().map(|bucket| (options.wire, size(bucket))).collect(),
            false => Vec::new(),
        });
        let pool = Pool::new(
            resources.account.clone(),
            Category::ReducePool,
            shapes.collect(),
            |unit| unit == 0 || unit >= len,
            PoolLimit::unreduced(options.depth, options.budget, options.wire),
            options.double_buffer,
        );
        let first = |(unit, buckets): (usize, Vec<BucketId>)| {
            let numel = numel(&buckets);
            Grads::new(vec![GradPart::new(buckets, numel, unit)])
        };
        let mut grads: Vec<Grads> = of_units.into_iter().enumerate().map(first).collect();
        let further = further.into_iter().enumerate();
        let further = further.map(|(index, bucket)| GradPart::new(vec![bucket], size(&bucket), len + index));
        grads[0].parts.extend(further);
        let pipeline = GradReducePipeline {
            comm,
            resources: resources.clone(),
            options,
            pool,
            queue: VecDeque::new(),
            reduced: Vec::new(),
            last: None,
            last_outer: None,
            held_back: false,
        };
        (pipeline, grads)
    }

    /// Sets the factor of contributions that are reduced from now on.
    pub(crate) fn set_scale(&mut self, scale: f32) {
        self.options.scale = scale;
    }

    /// Has the buckets of the pool in memory that stays, registered with the communicator that reduces them, and the main
    /// gradients with that of the outer ranks, if there are any. To be called on all ranks before the first reduction.
    pub(crate) fn register_pool(&mut self, how: Registration) -> Result<(), CommError> {
        if let Some(outer) = &self.options.outer {
            let grads = self.resources.buckets.iter().filter_map(|bucket| bucket.main_grad.as_ref());
            register(&*outer.comm, how, grads.map(|grads| grads.data().clone()).collect())?;
        }
        settle(&mut self.pool, &*self.comm)?;
        register(&*self.comm, how, self.pool.buffers_of(|_| true))
    }

    /// Opens the unit's targets, from now until [`Self::reduce`]. Waits, in stream order, until there is room for
    /// them. Units in use are around this one, and have to stay as they are until it has had its backward.
    pub(crate) fn open(&mut self, units: &mut Units, unit: UnitId) -> Result<(), CommError> {
        for other in units.ids() {
            let state = &mut units[other];
            state.grads.encloses = other != unit && state.weights.uses > 0;
        }
        (0..units[unit].grads.parts.len()).try_for_each(|part| self.open_part(units, unit, part))
    }

    /// [`Self::open`] of one part.
    pub(crate) fn open_part(
        &mut self,
        units: &mut Units,
        unit: UnitId,
        part: usize,
    ) -> Result<(), CommError> {
        let grads = &mut units[unit].grads.parts[part];
        if grads.reopen() {
            return Ok(());
        }
        let buckets = if self.options.strategy.shards_grads() {
            let (in_pool, numel) = (grads.in_pool, grads.numel);
            self.take_buckets(units, in_pool, numel)?
        } else {
            let slices = grads.mains(&self.resources).map(|main| main.data().clone()).collect();
            Buckets { lease: None, slices, fresh: grads.main == Main::Nothing }
        };
        units[unit].grads.parts[part].open(&self.resources, buckets, self.options.poison)
    }

    /// The unit's gradients are complete for this microbatch: every element of its targets is written.
    /// Reduces them, or keeps them for a later microbatch.
    pub(crate) fn reduce(
        &mut self,
        units: &mut Units,
        unit: UnitId,
        sync: Sync,
        moment: Moment,
    ) -> Result<(), CommError> {
        let mut parts = 0..units[unit].grads.parts.len();
        parts.try_for_each(|part| self.reduce_part(units, unit, part, sync, moment))
    }

    /// [`Self::reduce`] of one part.
    pub(crate) fn reduce_part(
        &mut self,
        units: &mut Units,
        unit: UnitId,
        part: usize,
        sync: Sync,
        moment: Moment,
    ) -> Result<(), CommError> {
        let grads = &mut units[unit].grads.parts[part];
        let sharded = self.options.strategy.shards_grads();
        if sharded && sync == Sync::Nothing {
            grads.hold();
            return Ok(());
        }
        let Some(Buckets { lease, slices, .. }) = grads.close() else { return Ok(()) };
        let add = grads.main != Main::Nothing;
        grads.main = grads.main.max(Main::Accumulated);
        let path = &self.resources.units[unit].path;
        if sharded {
            let mut passing = Vec::new();
            let mut parts = Vec::with_capacity(slices.len());
            for (&bucket, send) in grads.buckets.iter().zip(slices) {
                let recv = match &self.resources.buckets[bucket].main_grad {
                    Some(main_grad) => main_grad.shard(),
                    None if add => return Err(self.reduced_twice(path)),
                    None => {
                        let len = self.resources.buckets[bucket].layout.shard_len();
                        // SAFETY: the reduction below writes it, on its stream; the update that takes it waits for the
                        // event that goes with it.
                        let recv = unsafe {
                            self.resources.account.allocate(Category::MainGrads, self.options.main, len)
                        }?;
                        passing.push((bucket, recv.clone()));
                        recv
                    }
                };
                let accumulate = if add { Accumulate::Add } else { Accumulate::Overwrite };
                parts.push(Reduce { recv, send, scale: self.options.scale, accumulate });
            }
            GradPart::reduce_scatter(&self.resources, &*self.comm, path, parts, moment)?;
            let event = self.give_back(grads, lease);
            if !passing.is_empty() {
                self.reduced.push(ReducedUnit { grads: passing, event });
            }
        } else if sync == Sync::Step {
            self.reduce_whole(units, unit, part, moment)?;
        }
        if sync == Sync::Step { self.reduce_outer(units, unit, part, moment) } else { Ok(()) }
    }

    /// End of the last microbatch: reduces the units that have gradients of earlier microbatches only, as far as
    /// they are not reduced yet.
    pub(crate) fn reduce_remaining(&mut self, units: &mut Units, moment: Moment) -> Result<(), CommError> {
        // The further parts of the root come after all units.
        let first = units.ids().map(|unit| (unit, 0));
        let further = (1..units[UnitId::ROOT].grads.parts.len()).map(|part| (UnitId::ROOT, part));
        for (unit, part) in first.chain(further) {
            self.reduce_part(units, unit, part, Sync::Step, moment)?;
            if units[unit].grads.parts[part].main == Main::Accumulated {
                if !self.options.strategy.shards_grads() {
                    self.reduce_whole(units, unit, part, moment)?;
                }
                self.reduce_outer(units, unit, part, moment)?;
            }
        }
        Ok(())
    }

    /// The stream of the outer ranks' reductions, if there are any.
    #[allow(dead_code, reason = "asked for when a step is captured, with the feature `cuda`")]
    pub(crate) fn outer_stream(&self) -> Option<Arc<dyn Stream>> {
        self.options.outer.as_ref().map(|outer| outer.stream.clone())
    }

    fn reduced_twice(&self, path: &str) -> CommError {
        let message = format!(
            "unit `{path}` has gradients twice in one backward, after the optimizer has stepped it: train this model \
             without `step_in_backward`"
        );
        CommError::Invalid { rank: self.comm.rank(), message }
    }

    /// The compute stream waits for all reductions launched so far.
    pub(crate) fn finish(&mut self) -> Result<(), CommError> {
        let events = [self.last.take(), self.last_outer.take()];
        let waited = events.iter().flatten().try_for_each(|event| self.resources.streams.compute.wait(event));
        self.queue.drain(..).for_each(|reducing| self.pool.release(reducing.lease));
        waited
    }

    /// The main gradients are spent: the next contribution overwrites them.
    pub(crate) fn clear(&mut self, units: &mut Units) {
        for part in units.iter_mut().flat_map(|unit| &mut unit.grads.parts) {
            part.main = Main::Nothing;
        }
    }

    /// Gives up targets that an error left open.
    pub(crate) fn abandon(&mut self, units: &mut Units) {
        self.reduced.clear();
        for part in units.iter_mut().flat_map(|unit| &mut unit.grads.parts) {
            if let Some(Buckets { lease: Some(lease), .. }) = part.close() {
                self.pool.release(lease);
            }
        }
    }

    /// Room for the gradients of a part, once there is.
    fn take_buckets(&mut self, units: &Units, in_pool: usize, numel: usize) -> Result<Buckets, CommError> {
        self.make_room(units, in_pool, numel)?;
        let lease = self.pool.acquire(in_pool)?;
        let slices = lease.iter().flat_map(Lease::buffers).cloned().collect();
        Ok(Buckets { lease, slices, fresh: true })
    }

    /// Waits, in stream order, for the reductions launched first, until there is room for the gradients of a part. All ranks
    /// have launched them, in this order, before they come here: the wait ends.
    fn make_room(&mut self, units: &Units, in_pool: usize, numel: usize) -> Result<(), CommError> {
        while !self.has_room(units, in_pool, numel) {
            let Some(first) = self.queue.pop_front() else {
                // What is open waits for a later backward.
                self.held_back = true;
                break;
            };
            self.resources.streams.compute.wait(&first.done)?;
            self.pool.release(first.lease);
        }
        Ok(())
    }

    fn has_room(&self, units: &Units, in_pool: usize, numel: usize) -> bool {
        if self.queue.iter().any(|reducing| reducing.in_pool == in_pool) {
            // Its own gradients of an earlier backward are being reduced.
            return false;
        }
        if !self.pool.is_shared(in_pool) {
            return true;
        }
        let waiting = units.iter().filter(|unit| !unit.grads.encloses).flat_map(|unit| &unit.grads.parts);
        let open = waiting.filter(|part| part.has_lease() && part.in_pool != in_pool);
        let unreduced = open.map(|part| (part.in_pool, part.numel));
        let unreduced = unreduced.chain(self.queue.iter().map(|reducing| (reducing.in_pool, reducing.numel)));
        let unreduced = unreduced.filter(|&(other, _)| self.pool.is_shared(other));
        let (parts, held) = unreduced.fold((0, 0), |(parts, held), (_, numel)| (parts + 1, held + numel));
        match self.options.budget {
            _ if parts == 0 => true,
            Some(budget) => held + numel <= budget,
            None => parts < self.options.depth,
        }
    }

    /// The part's buckets are free again when what was launched last is over.
    fn give_back(&mut self, part: &GradPart, lease: Option<Lease>) -> Arc<dyn Event> {
        let done = self.resources.streams.reduce.record();
        if let Some(lease) = lease {
            let GradPart { in_pool, numel, .. } = *part;
            self.queue.push_back(Reducing { in_pool, numel, lease, done: done.clone() });
        }
        self.last = Some(done.clone());
        done
    }

    /// ZeRO-0 and 1: reduces the whole main-gradient buffers in place.
    fn reduce_whole(
        &mut self,
        units: &mut Units,
        unit: UnitId,
        part: usize,
        moment: Moment,
    ) -> Result<(), CommError> {
        let grads = &mut units[unit].grads.parts[part];
        grads.main = Main::Reduced;
        if grads.buckets.is_empty() {
            return Ok(());
        }
        let (in_pool, numel) = (grads.in_pool, grads.numel);
        let wire = if self.options.wire != self.options.main {
            self.take_buckets(units, in_pool, numel)?
        } else {
            Buckets { lease: None, slices: Vec::new(), fresh: true }
        };
        let grads = &units[unit].grads.parts[part];
        for (main, bucket) in grads.mains(&self.resources).zip(&wire.slices) {
            cast(&*self.resources.streams.compute, main.data(), bucket)?;
        }
        let how = (self.options.scale, !self.options.strategy.shards_optim());
        let path = &self.resources.units[unit].path;
        grads.reduce_whole(&self.resources, &*self.comm, path, &wire.slices, how, moment)?;
        self.give_back(grads, wire.lease);
        Ok(())
    }

    /// Reduces the main gradients of a part over the outer ranks, if there are any.
    fn reduce_outer(
        &mut self,
        units: &mut Units,
        unit: UnitId,
        part: usize,
        moment: Moment,
    ) -> Result<(), CommError> {
        let Some(outer) = &self.options.outer else { return Ok(()) };
        let grads = &mut units[unit].grads.parts[part];
        grads.main = Main::Reduced;
        if grads.buckets.is_empty() {
            return Ok(());
        }
        let whole = !self.options.strategy.shards_optim();
        grads.reduce_outer(&self.resources, outer, &self.resources.units[unit].path, whole, moment)?;
        self.last_outer = Some(outer.stream.record());
        Ok(())
    }
}
