//! The whole weights of one unit: where they are, and how they come and go.

use std::sync::Arc;

use super::super::ids::UnitId;
use super::{Moment, Resources, Unit};
use crate::comm::{CommError, Communicator, Gather};
use crate::device::{Event, Fill, Slice, Stream, cast, fill};
use crate::memory::{Category, Lease};
use crate::spec::ReshardAfterForward;

/// How the shards have changed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    /// By an optimizer step: each outer rank has changed its part of the trainable ones.
    Step,
    /// Each rank has written its whole shard, of one unit or of all.
    Loaded(Option<UnitId>),
}

/// What a unit does with its whole weights between forward and backward.
#[derive(Clone)]
pub(crate) enum Reshard {
    Always,
    Never,
    /// Keeps the part of this rank in a group of neighbours, this one.
    Within(Arc<dyn Communicator>),
}

enum Status {
    /// Whole weights are not here (or, if kept whole, are out of date).
    Sharded,
    InFlight(Arc<dyn Event>),
    Ready,
}

/// The whole weights of one unit.
pub(crate) struct Weights {
    status: Status,
    /// The memory of `full`, where weights are not held whole anyway.
    lease: Option<Lease>,
    /// One slice a bucket.
    full: Vec<Slice>,
    /// Forwards and backwards that use them now.
    pub(crate) uses: usize,
    pub(super) last_used: u64,
    pub(super) reshard: Reshard,
    /// What it was made with.
    built: Reshard,
    /// It was told to keep its whole weights, now or before.
    pub(crate) was_kept: bool,
    /// A backward that needs the weights is to come.
    pub(crate) expected: bool,
    /// This rank's part of the weights in its group of neighbours, between forward and backward.
    kept: Vec<Slice>,
    /// Frozen weights that are held whole were gathered; they change only when weights are loaded.
    frozen_gathered: bool,
    /// The outer ranks have updated their parts of the shards.
    pub(super) outer_stale: bool,
}

impl Weights {
    /// Weights that are not here; with `whole`, in this memory, where they are held whole.
    pub(super) fn new(reshard: Reshard, whole: Vec<Slice>) -> Weights {
        Weights {
            status: Status::Ready,
            lease: None,
            full: whole,
            uses: 0,
            last_used: 0,
            built: reshard.clone(),
            was_kept: matches!(reshard, Reshard::Never),
            reshard,
            expected: false,
            kept: Vec::new(),
            frozen_gathered: false,
            outer_stale: false,
        }
    }

    /// One slice a bucket, whole once the gather that is under way is over.
    pub(crate) fn full(&self) -> &[Slice] {
        &self.full
    }

    /// From now on, between forward and backward, they are as `mode` says; groups of ranks are those that were made with them.
    pub(super) fn set_reshard(&mut self, mode: ReshardAfterForward) {
        self.kept.clear();
        self.reshard = match mode {
            ReshardAfterForward::Always => Reshard::Always,
            ReshardAfterForward::Never => Reshard::Never,
            ReshardAfterForward::Ranks(_) => self.built.clone(),
        };
        self.was_kept |= matches!(self.reshard, Reshard::Never);
    }

    pub(super) fn is_sharded(&self) -> bool {
        matches!(self.status, Status::Sharded)
    }

    pub(super) fn is_in_flight(&self) -> bool {
        matches!(self.status, Status::InFlight(_))
    }

    pub(super) fn is_ready(&self) -> bool {
        matches!(self.status, Status::Ready)
    }

    /// They occupy memory of the pool, and nobody uses them.
    pub(super) fn is_idle(&self) -> bool {
        self.is_gathered() && self.uses == 0
    }

    /// They occupy memory of the pool.
    pub(crate) fn is_gathered(&self) -> bool {
        self.lease.is_some()
    }

    /// This memory of the pool is theirs, for a gather that follows.
    pub(super) fn take(&mut self, lease: Option<Lease>) {
        self.full = lease.iter().flat_map(Lease::buffers).cloned().collect();
        self.lease = lease;
    }

    /// Waits, in stream order, for a gather that is under way.
    pub(crate) fn wait(&mut self, compute: &dyn Stream) -> Result<(), CommError> {
        if let Status::InFlight(event) = &self.status {
            compute.wait(event)?;
            self.status = Status::Ready;
        }
        Ok(())
    }

    /// No backward is to come.
    pub(super) fn expect_nothing(&mut self) {
        self.expected = false;
        self.kept.clear();
    }

    /// The shards of the model have changed, those of this unit too if `change` is of it.
    pub(super) fn mark_sharded(&mut self, unit: UnitId, change: Change) {
        self.status = Status::Sharded;
        self.expect_nothing();
        match change {
            Change::Step => self.outer_stale = true,
            Change::Loaded(loaded) if loaded.is_none_or(|loaded| loaded == unit) => {
                (self.frozen_gathered, self.outer_stale) = (false, false);
            }
            Change::Loaded(_) => {}
        }
    }

    /// Starts a gather into `full`, of whole weights that are refreshed `in_place` or not held, as `how` says.
    pub(super) fn gather(
        &mut self,
        resources: &Resources,
        unit: &Unit,
        how: &How<'_>,
        moment: Moment,
    ) -> Result<(), CommError> {
        self.complete_shard(resources, unit, how.outer, moment)?;
        if !self.kept.is_empty() {
            return self.gather_kept(resources, unit, moment);
        }
        let parts: Vec<Gather> = unit
            .buckets
            .iter()
            .map(|&bucket| &resources.buckets[bucket])
            .zip(&self.full)
            .filter(|_| how.sharded)
            .filter(|(bucket, _)| {
                let frozen = !bucket.layout.key.requires_grad;
                !(how.in_place && frozen && self.frozen_gathered)
            })
            .map(|(bucket, full)| Gather { send: bucket.model_weight.shard(), recv: full.clone() })
            .collect();
        // The shards were last written on the compute stream, or by the outer ranks on this one.
        resources.streams.gather.wait(&resources.streams.compute.record())?;
        let at_once = if how.one_by_one { 1 } else { parts.len().max(1) };
        for parts in parts.chunks(at_once) {
            all_gather(resources, unit, "all-gather", how.comm, parts.to_vec(), moment)?;
        }
        (self.status, self.frozen_gathered) = (Status::InFlight(resources.streams.gather.record()), true);
        Ok(())
    }

    /// Gathers, within a group of neighbours, what they have kept of the weights since the forward.
    fn gather_kept(&mut self, resources: &Resources, unit: &Unit, moment: Moment) -> Result<(), CommError> {
        let Reshard::Within(neighbours) = &self.reshard else { return Ok(()) };
        let kept = std::mem::take(&mut self.kept);
        let parts = kept.iter().cloned().zip(&self.full);
        let parts: Vec<Gather> = parts.map(|(send, recv)| Gather { send, recv: recv.clone() }).collect();
        let gather = &resources.streams.gather;
        gather.wait(&resources.streams.compute.record())?;
        all_gather(resources, unit, "all-gather", &**neighbours, parts, moment)?;
        // SAFETY: the compute stream has written them before the gather, which is the last to read them, on this stream.
        unsafe { gather.retire(&kept) };
        self.status = Status::InFlight(gather.record());
        Ok(())
    }

    /// After an optimizer step: completes the unit's shards by the parts that other outer ranks have updated.
    pub(super) fn complete_shard(
        &mut self,
        resources: &Resources,
        unit: &Unit,
        outer: Option<&dyn Communicator>,
        moment: Moment,
    ) -> Result<(), CommError> {
        let Some(outer) = outer.filter(|_| self.outer_stale) else { return Ok(()) };
        self.outer_stale = false;
        let buckets = unit.buckets.iter().map(|&bucket| &resources.buckets[bucket]);
        let parts: Vec<Gather> = buckets
            .filter(|bucket| bucket.layout.key.requires_grad)
            .map(|bucket| Gather {
                send: bucket.model_weight.part(bucket.owned.clone()),
                recv: bucket.model_weight.shard(),
            })
            .collect();
        if parts.is_empty() {
            return Ok(());
        }
        resources.streams.gather.wait(&resources.streams.compute.record())?;
        all_gather(resources, unit, "outer all-gather", outer, parts, moment)
    }

    /// Gives memory of the pool back, once a gather that is under way has ended: until then peers read this rank's shard.
    pub(super) fn evict(&mut self, resources: &Resources, poison: bool) -> Result<Option<Lease>, CommError> {
        let compute = &*resources.streams.compute;
        self.wait(compute)?;
        self.status = Status::Sharded;
        let full = std::mem::take(&mut self.full);
        if let Reshard::Within(neighbours) = &self.reshard
            && self.expected
            && self.kept.is_empty()
        {
            let (rank, ranks) = (neighbours.rank(), neighbours.size());
            for slice in &full {
                let len = slice.len() / ranks;
                // SAFETY: it is written here, on the compute stream, and then only read, by gathers: those begin when
                // the compute stream has passed their launch.
                let kept = unsafe { resources.account.allocate(Category::GatherPool, slice.dtype(), len) }?;
                cast(compute, &slice.range(rank * len..(rank + 1) * len), &kept)?;
                self.kept.push(kept);
            }
        }
        if self.lease.is_some() && poison {
            for slice in full {
                fill(compute, &slice, Fill::Poison)?;
            }
        }
        Ok(self.lease.take())
    }
}

/// Launches a gather of the unit's.
fn all_gather(
    resources: &Resources,
    unit: &Unit,
    name: &'static str,
    comm: &dyn Communicator,
    parts: Vec<Gather>,
    moment: Moment,
) -> Result<(), CommError> {
    let gather = &*resources.streams.gather;
    resources.tracer.enqueue(gather, "all-gather", name, &unit.path, || {
        comm.all_gather(gather, moment.tag(&unit.path), parts)
    })
}

/// How the weights of a unit are gathered.
pub(super) struct How<'a> {
    pub comm: &'a dyn Communicator,
    /// Outer ranks that update parts of the shards.
    pub outer: Option<&'a dyn Communicator>,
    /// There are shards.
    pub sharded: bool,
    /// Whole weights are held, and refreshed where they are.
    pub in_place: bool,
    /// Each bucket by itself.
    pub one_by_one: bool,
}
