//! Reduces the gradients of units behind their birth.
//!
//! ZeRO-2 and 3: a unit's gradients are written into a bucket of a fixed pool, two buckets for each class of
//! equally shaped units, and the reduce-scatter accumulates into the main-gradient shard; the bucket is
//! written again once that is done. ZeRO-0 and 1: gradients are written (or added) straight into the whole
//! main-gradient buffer, which is reduced in place once, in the last microbatch.

use std::sync::Arc;

use super::{Moment, Streams};
use crate::buffer::GroupBuffers;
use crate::comm::{Accumulate, CommError, Communicator, Gather, Reduce};
use crate::device::{Event, Fill, Slice, cast, fill};
use crate::memory::{Account, Category, Pool, SlotId};
use crate::spec::{Dtype, Strategy};
use crate::trace::Tracer;

/// Settings of the pipeline.
#[derive(Clone, Debug)]
pub(crate) struct ReduceOptions {
    pub strategy: Strategy,
    /// Dtype of the buckets that travel.
    pub wire: Dtype,
    /// Factor of each reduced contribution.
    pub scale: f32,
    /// Buckets a class.
    pub depth: usize,
    pub double_buffer: bool,
    pub poison: bool,
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
    open: Option<(Option<SlotId>, Vec<GradTarget>)>,
    /// The main gradients hold a contribution of this step.
    accumulated: bool,
    /// ZeRO-0 and 1: they were reduced.
    synced: bool,
}

pub(crate) struct GradReducePipeline {
    comm: Arc<dyn Communicator>,
    streams: Streams,
    tracer: Arc<Tracer>,
    options: ReduceOptions,
    account: Account,
    pool: Pool,
    units: Vec<UnitGrads>,
    reduced: Option<ReducedUnit>,
    last: Option<Arc<dyn Event>>,
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
        let units: Vec<UnitGrads> = units
            .into_iter()
            .map(|(path, mut buckets)| {
                buckets.retain(|&group| groups[group].layout.key.requires_grad);
                UnitGrads { path, groups: buckets, open: None, accumulated: false, synced: false }
            })
            .collect();
        let needs_buckets = options.strategy.shards_grads() || options.wire != Dtype::F32;
        let shapes = units.iter().map(|unit| {
            let shape = |&group: &usize| (options.wire, groups[group].layout.size);
            if needs_buckets { unit.groups.iter().map(shape).collect() } else { Vec::new() }
        });
        let pool = Pool::new(
            account.clone(),
            Category::ReducePool,
            shapes.collect(),
            options.depth,
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
            reduced: None,
            last: None,
        }
    }

    /// Where the unit's gradients go, from now until [`Self::reduce`]. Waits, in stream order, until a bucket
    /// is free.
    pub(crate) fn open(
        &mut self,
        groups: &[GroupBuffers],
        unit: usize,
    ) -> Result<Vec<GradTarget>, CommError> {
        if let Some((_, targets)) = &self.units[unit].open {
            return Ok(targets.clone());
        }
        let (slot, buckets) = if self.options.strategy.shards_grads() {
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
        state.open = Some((slot, targets.clone()));
        Ok(targets)
    }

    /// The unit's gradients are complete for this microbatch: every element of its targets is written.
    /// Reduces them, or keeps them for the last microbatch where the strategy says so.
    pub(crate) fn reduce(
        &mut self,
        groups: &[GroupBuffers],
        unit: usize,
        last_microbatch: bool,
        moment: Moment,
    ) -> Result<(), CommError> {
        let Some((slot, targets)) = self.units[unit].open.take() else {
            return Ok(());
        };
        let add = self.units[unit].accumulated;
        self.units[unit].accumulated = true;
        if self.options.strategy.shards_grads() {
            let mut passing = Vec::new();
            let mut parts = Vec::with_capacity(targets.len());
            for target in targets {
                let layout = &groups[target.group].layout;
                let recv = match &groups[target.group].main_grad {
                    Some(main_grad) => main_grad.shard(),
                    None if add => return Err(self.reduced_twice(unit)),
                    None => {
                        let recv = self.account.allocate(Category::MainGrads, Dtype::F32, layout.shard_len());
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
            let event = self.give_back(slot);
            self.reduced = (!passing.is_empty()).then_some(ReducedUnit { grads: passing, event });
        } else if last_microbatch {
            self.reduce_whole(groups, unit, moment)?;
        }
        Ok(())
    }

    /// ZeRO-0 and 1, end of the last microbatch: reduces the units that have gradients of earlier
    /// microbatches only.
    pub(crate) fn reduce_remaining(
        &mut self,
        groups: &[GroupBuffers],
        moment: Moment,
    ) -> Result<(), CommError> {
        if self.options.strategy.shards_grads() {
            return Ok(());
        }
        for unit in 0..self.units.len() {
            if self.units[unit].accumulated && !self.units[unit].synced {
                self.reduce_whole(groups, unit, moment)?;
            }
        }
        Ok(())
    }

    /// ZeRO-0 and 1: the gradients of this step were reduced in place, so nothing more can be added.
    pub(crate) fn is_synced(&self) -> bool {
        self.units.iter().any(|unit| unit.synced)
    }

    /// The main gradients of the unit hold a contribution of this step.
    pub(crate) fn has_gradient(&self, unit: usize) -> bool {
        self.units[unit].accumulated
    }

    /// What was reduced last, where the model keeps no main gradients, unless it was taken already.
    pub(crate) fn take_reduced(&mut self) -> Option<ReducedUnit> {
        self.reduced.take()
    }

    fn reduced_twice(&self, unit: usize) -> CommError {
        let message = format!(
            "unit `{}` has gradients twice in one backward, after the optimizer has stepped it: train this model \
             without `step_in_backward`",
            self.units[unit].path
        );
        CommError::Invalid { rank: self.comm.rank(), message }
    }

    /// Units whose targets are open.
    pub(crate) fn open_units(&self) -> Vec<usize> {
        (0..self.units.len()).filter(|&unit| self.units[unit].open.is_some()).collect()
    }

    /// The compute stream waits for all reductions launched so far.
    pub(crate) fn finish(&mut self) -> Result<(), CommError> {
        match self.last.take() {
            Some(event) => self.streams.compute.wait(&event),
            None => Ok(()),
        }
    }

    /// The main gradients are spent: the next contribution overwrites them.
    pub(crate) fn clear(&mut self) {
        self.units.iter_mut().for_each(|unit| (unit.accumulated, unit.synced) = (false, false));
    }

    /// Gives up targets that an error left open.
    pub(crate) fn abandon(&mut self) {
        self.reduced = None;
        for unit in 0..self.units.len() {
            if let Some((slot, _)) = self.units[unit].open.take() {
                self.give_back_now(slot);
            }
        }
    }

    fn take_buckets(&mut self, unit: usize) -> Result<(Option<SlotId>, Vec<Slice>), CommError> {
        if self.units[unit].groups.is_empty() {
            return Ok((None, Vec::new()));
        }
        match self.pool.acquire(unit, &*self.streams.compute)? {
            Some((slot, buckets)) => Ok((Some(slot), buckets)),
            None => Ok((None, self.pool.fallback(unit))),
        }
    }

    fn give_back(&mut self, slot: Option<SlotId>) -> Arc<dyn Event> {
        let event = self.streams.reduce.record();
        if let Some(slot) = slot {
            self.pool.release(slot, event.clone());
        }
        self.last = Some(event.clone());
        event
    }

    fn give_back_now(&mut self, slot: Option<SlotId>) {
        if let Some(slot) = slot {
            self.pool.release(slot, self.streams.compute.record());
        }
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
        let narrow = self.options.wire != Dtype::F32;
        let (slot, wire) = if narrow { self.take_buckets(unit)? } else { (None, Vec::new()) };
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
        self.give_back(slot);
        Ok(())
    }
}

fn main_grad(groups: &[GroupBuffers], group: usize) -> &crate::buffer::DataParallelBuffer {
    groups[group].main_grad.as_ref().expect("a trainable group has main gradients")
}
