//! Gathers the parameters of units ahead of their use.
//!
//! A unit's full weights live in a slot of a fixed pool, two slots for each class of equally shaped units:
//! one in use, one being filled for the next unit. A unit that was used keeps its slot, weights valid, until
//! another unit needs it (lazy release): the last units of a forward are the first of the backward and are
//! not gathered again.
//!
//! Where the strategy keeps whole weights (ZeRO-1, 2), a gather refreshes them in place after each optimizer
//! step, through the same schedule.

use std::sync::Arc;

use super::{Moment, Order, Streams};
use crate::buffer::GroupBuffers;
use crate::comm::{CommError, Communicator, Gather};
use crate::device::{Event, Fill, Slice, fill};
use crate::memory::{Account, Category, Pool, SlotId};
use crate::spec::Strategy;
use crate::trace::Tracer;

/// Settings of the pipeline.
#[derive(Clone)]
pub(crate) struct GatherOptions {
    pub strategy: Strategy,
    /// Units ahead, in either direction.
    pub prefetch: usize,
    /// Most elements gathered or in flight before a prefetch is held back.
    pub budget: Option<usize>,
    /// Slots a class.
    pub depth: usize,
    /// Keep the slots' memory, and released weights in it, until needed.
    pub double_buffer: bool,
    pub poison: bool,
    /// Outer ranks that update parts of the shards: after an optimizer step each gathers those of the others,
    /// just ahead of the unit's gather.
    pub outer: Option<Arc<dyn Communicator>>,
}

enum Status {
    /// Whole weights are not here (or, if kept whole, are out of date).
    Sharded,
    InFlight(Arc<dyn Event>),
    Ready,
}

struct UnitWeights {
    path: Arc<str>,
    groups: Vec<usize>,
    numel: usize,
    status: Status,
    slot: Option<SlotId>,
    full: Vec<Slice>,
    users: usize,
    last_used: u64,
    /// Frozen weights that are held whole were gathered; they change only when weights are loaded.
    frozen_gathered: bool,
    /// The outer ranks have updated their parts of the shards.
    outer_stale: bool,
}

pub(crate) struct AllGatherPipeline {
    comm: Arc<dyn Communicator>,
    streams: Streams,
    tracer: Arc<Tracer>,
    options: GatherOptions,
    pool: Pool,
    units: Vec<UnitWeights>,
    pub(crate) forward_order: Order,
    pub(crate) backward_order: Order,
    clock: u64,
}

/// Which pass a unit is needed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    Forward,
    Backward,
}

impl AllGatherPipeline {
    /// `units`: path and groups of each unit, root first.
    pub(crate) fn new(
        comm: Arc<dyn Communicator>,
        streams: Streams,
        tracer: Arc<Tracer>,
        account: &Account,
        options: GatherOptions,
        units: Vec<(Arc<str>, Vec<usize>)>,
        groups: &[GroupBuffers],
    ) -> Self {
        let sharded = options.strategy.shards_params();
        let shapes = units.iter().map(|(_, buckets)| {
            let shape = |&group: &usize| (groups[group].layout.key.dtype, groups[group].layout.size);
            if sharded { buckets.iter().map(shape).collect() } else { Vec::new() }
        });
        let pool = Pool::new(
            account.clone(),
            Category::GatherPool,
            shapes.collect(),
            options.depth,
            options.double_buffer,
        );
        let units = units.into_iter().map(|(path, buckets)| UnitWeights {
            path,
            numel: buckets.iter().map(|&group| groups[group].layout.size).sum(),
            full: if sharded {
                Vec::new()
            } else {
                buckets.iter().map(|&group| groups[group].model_weight.data().clone()).collect()
            },
            groups: buckets,
            status: Status::Ready,
            slot: None,
            users: 0,
            last_used: 0,
            frozen_gathered: false,
            outer_stale: false,
        });
        let mut pipeline = AllGatherPipeline {
            comm,
            streams,
            tracer,
            pool,
            units: units.collect(),
            options,
            forward_order: Order::default(),
            backward_order: Order::default(),
            clock: 0,
        };
        pipeline.mark_stale(true);
        pipeline
    }

    /// The unit's full weights, one slice a group, valid on the compute stream from now until
    /// [`Self::release`]. Launches the gather if it is not under way, then those of the next units of the
    /// pass (`None`: a unit inside one that is recomputed, which foretells nothing).
    ///
    pub(crate) fn acquire(
        &mut self,
        groups: &[GroupBuffers],
        unit: usize,
        pass: Option<Pass>,
        moment: Moment,
    ) -> Result<Vec<Slice>, CommError> {
        if let Some(pass) = pass
            && unit != 0
        {
            self.order(pass).advance(unit);
        }
        if matches!(self.units[unit].status, Status::Sharded) {
            self.launch(groups, unit, true, moment)?;
        }
        self.units[unit].users += 1;
        if let Some(pass) = pass {
            self.prefetch(groups, pass, moment)?;
        }
        if let Status::InFlight(event) = &self.units[unit].status {
            self.streams.compute.wait(event)?;
            self.units[unit].status = Status::Ready;
        }
        Ok(self.units[unit].full.clone())
    }

    /// One use of the unit's full weights is over.
    pub(crate) fn release(&mut self, unit: usize) -> Result<(), CommError> {
        self.clock += 1;
        let weights = &mut self.units[unit];
        weights.users -= 1;
        weights.last_used = self.clock;
        // What is outside the fixed slots is not kept beyond its use.
        if weights.users == 0 && (weights.slot.is_none() || !self.options.double_buffer) {
            self.evict(unit)?;
        }
        Ok(())
    }

    /// Takes all full weights that are not in use out of the pool: after evaluation, before the weights
    /// change, after an error.
    pub(crate) fn reset(&mut self) -> Result<(), CommError> {
        for unit in 0..self.units.len() {
            if self.units[unit].users == 0 {
                self.evict(unit)?;
            }
        }
        Ok(())
    }

    /// The shards have changed, those of frozen groups too if `loaded`, else each outer rank's part of them by
    /// an optimizer step: what was gathered is out of date. To be called after [`Self::reset`].
    pub(crate) fn mark_stale(&mut self, loaded: bool) {
        if self.options.strategy.shards_optim() || self.options.outer.is_some() {
            for weights in &mut self.units {
                weights.status = Status::Sharded;
                weights.frozen_gathered &= !loaded;
                weights.outer_stale = !loaded;
            }
        }
    }

    /// Paths of the units whose full weights occupy memory of the pool now.
    pub(crate) fn gathered(&self) -> Vec<Arc<str>> {
        self.units.iter().filter(|unit| unit.slot.is_some()).map(|unit| unit.path.clone()).collect()
    }

    fn order(&mut self, pass: Pass) -> &mut Order {
        match pass {
            Pass::Forward => &mut self.forward_order,
            Pass::Backward => &mut self.backward_order,
        }
    }

    fn prefetch(&mut self, groups: &[GroupBuffers], pass: Pass, moment: Moment) -> Result<(), CommError> {
        let depth = self.options.prefetch;
        let next: Vec<usize> = self.order(pass).upcoming().take(depth).collect();
        for unit in next {
            let resident: usize = self.units[1..].iter().filter(|u| u.slot.is_some()).map(|u| u.numel).sum();
            let over = self.options.budget.is_some_and(|budget| resident + self.units[unit].numel > budget);
            if matches!(self.units[unit].status, Status::Sharded) && !over {
                self.launch(groups, unit, false, moment)?;
            }
        }
        Ok(())
    }

    /// Starts the unit's gather. A prefetch gives up if no slot is idle or can be taken from a unit that was
    /// already used; a demand may take one from a prefetched unit too, and in the last resort allocates.
    fn launch(
        &mut self,
        groups: &[GroupBuffers],
        unit: usize,
        demand: bool,
        moment: Moment,
    ) -> Result<(), CommError> {
        if self.options.strategy.shards_params() {
            let mut acquired = self.pool.acquire(unit, &*self.streams.gather)?;
            if acquired.is_none()
                && let Some(victim) = self.victim(unit, demand)
            {
                self.evict(victim)?;
                acquired = self.pool.acquire(unit, &*self.streams.gather)?;
            }
            let weights = &mut self.units[unit];
            match acquired {
                Some((slot, full)) => (weights.slot, weights.full) = (Some(slot), full),
                None if demand => weights.full = self.pool.fallback(unit),
                None => return Ok(()),
            }
        }
        self.launch_outer(groups, unit, moment)?;
        let weights = &self.units[unit];
        let in_place = !self.options.strategy.shards_params();
        let parts: Vec<Gather> = weights
            .groups
            .iter()
            .zip(&weights.full)
            .filter(|_| self.options.strategy.shards_optim())
            .filter(|&(&group, _)| {
                let frozen = !groups[group].layout.key.requires_grad;
                !(in_place && frozen && weights.frozen_gathered)
            })
            .map(|(&group, full)| Gather { send: groups[group].model_weight.shard(), recv: full.clone() })
            .collect();
        let (gather, path) = (&self.streams.gather, &weights.path);
        // The shards were last written on the compute stream, or by the outer ranks on this one.
        gather.wait(&self.streams.compute.record())?;
        if !parts.is_empty() {
            self.tracer.enqueue(&**gather, "all-gather", "all-gather", path, || {
                self.comm.all_gather(&**gather, moment.tag(path), parts)
            })?;
        }
        let event = gather.record();
        let weights = &mut self.units[unit];
        (weights.status, weights.frozen_gathered) = (Status::InFlight(event), true);
        Ok(())
    }

    /// After an optimizer step: completes the unit's shards by the parts that other outer ranks have updated.
    fn launch_outer(
        &mut self,
        groups: &[GroupBuffers],
        unit: usize,
        moment: Moment,
    ) -> Result<(), CommError> {
        let weights = &mut self.units[unit];
        let Some(outer) = self.options.outer.as_ref().filter(|_| weights.outer_stale) else { return Ok(()) };
        weights.outer_stale = false;
        let trainable = weights.groups.iter().map(|&group| &groups[group]);
        let parts: Vec<Gather> = trainable
            .filter(|group| group.layout.key.requires_grad)
            .map(|group| Gather {
                send: group.model_weight.part(group.owned.clone()),
                recv: group.model_weight.shard(),
            })
            .collect();
        if parts.is_empty() {
            return Ok(());
        }
        let (gather, path) = (&self.streams.gather, &weights.path);
        gather.wait(&self.streams.compute.record())?;
        self.tracer.enqueue(&**gather, "all-gather", "outer all-gather", path, || {
            outer.all_gather(&**gather, moment.tag(path), parts)
        })
    }

    /// A unit whose slot `unit` may take: the one used longest ago, or for a demand one that waits to be
    /// used.
    fn victim(&self, unit: usize, demand: bool) -> Option<usize> {
        let candidates = self.units.iter().enumerate().filter(|&(other, weights)| {
            let used = matches!(weights.status, Status::Ready);
            weights.slot.is_some()
                && weights.users == 0
                && (used || demand)
                && self.pool.same_class(unit, other)
        });
        candidates
            .min_by_key(|(_, weights)| (matches!(weights.status, Status::InFlight(_)), weights.last_used))
            .map(|(other, _)| other)
    }

    /// Gives the unit's full weights up, once a gather that is under way has ended: until then peers read this
    /// rank's shard. Weights that are kept whole stay.
    fn evict(&mut self, unit: usize) -> Result<(), CommError> {
        let weights = &mut self.units[unit];
        if let Status::InFlight(event) = &weights.status {
            self.streams.compute.wait(event)?;
            weights.status = Status::Ready;
        }
        if !self.options.strategy.shards_params() {
            return Ok(());
        }
        weights.status = Status::Sharded;
        let full = std::mem::take(&mut weights.full);
        let Some(slot) = weights.slot.take() else {
            return Ok(());
        };
        if self.options.poison {
            for slice in full {
                fill(&*self.streams.compute, &slice, Fill::Poison)?;
            }
        }
        self.pool.release(slot, self.streams.compute.record());
        Ok(())
    }
}
