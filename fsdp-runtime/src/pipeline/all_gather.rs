//! Gathers the parameters of units ahead of their use.
//!
//! A unit's full weights live in buffers of a pool. Those of a few units are there at a time, whatever their shapes: the
//! unit that runs and as many as are gathered ahead, two at least. A unit that was used keeps its buffers, weights valid,
//! until another unit needs the room (lazy release): the last units of a forward are the first of the backward and are
//! not gathered again. Units that run inside others come on top, as the others have to stay.
//!
//! Where the strategy keeps whole weights (ZeRO-1, 2), a gather refreshes them in place after each optimizer
//! step, through the same schedule.

use std::sync::Arc;

use super::registration::{register, register_outer, settle};
use super::{Moment, Order, Streams};
use crate::buffer::GroupBuffers;
use crate::comm::{CommError, Communicator, Gather, Registration};
use crate::device::{Event, Fill, Slice, cast, fill};
use crate::layout::PoolLimit;
use crate::memory::{Account, Category, Lease, Pool};
use crate::spec::{ReshardAfterForward, Strategy};
use crate::trace::Tracer;

/// Settings of the pipeline.
#[derive(Clone)]
pub(crate) struct GatherOptions {
    pub strategy: Strategy,
    /// Units ahead.
    pub prefetch: Prefetch,
    /// Most elements gathered or in flight; one unit may be larger.
    pub budget: Option<usize>,
    /// Units at a time, if fewer are gathered ahead.
    pub depth: usize,
    /// Keep released weights, and their memory, until the room is needed.
    pub double_buffer: bool,
    pub poison: bool,
    /// The root's buckets are gathered one by one, not as one.
    pub split_root: bool,
    /// Outer ranks that update parts of the shards: after an optimizer step each gathers those of the others,
    /// just ahead of the unit's gather.
    pub outer: Option<Arc<dyn Communicator>>,
}

impl GatherOptions {
    /// How much may be gathered at a time, where an element has `widest` bytes at most.
    fn limit(&self, widest: usize) -> PoolLimit {
        PoolLimit::gathered(self.depth, self.prefetch.deepest(), self.budget, widest)
    }
}

/// Units that are gathered ahead of the present one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prefetch {
    pub forward: usize,
    pub backward: usize,
}

impl Prefetch {
    fn deepest(self) -> usize {
        self.forward.max(self.backward)
    }
}

/// How the shards have changed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    /// By an optimizer step: each outer rank has changed its part of the trainable ones.
    Step,
    /// Each rank has written its whole shard, of one unit or of all.
    Loaded(Option<usize>),
}

/// What a unit does with its whole weights between forward and backward.
#[derive(Clone)]
pub(crate) enum Reshard {
    Always,
    Never,
    /// Keeps the part of this rank in a group of neighbours, this one.
    Within(Arc<dyn Communicator>),
}

/// One unit, as the pipeline is told of it.
pub(crate) struct GatherUnit {
    pub path: Arc<str>,
    pub groups: Vec<usize>,
    pub reshard: Reshard,
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
    /// The memory of `full`, where weights are not held whole anyway.
    lease: Option<Lease>,
    full: Vec<Slice>,
    users: usize,
    last_used: u64,
    reshard: Reshard,
    /// What it was made with.
    built: Reshard,
    /// It was told to keep its whole weights, now or before.
    was_kept: bool,
    /// A backward that needs the weights is to come.
    expected: bool,
    /// This rank's part of the weights in its group of neighbours, between forward and backward.
    kept: Vec<Slice>,
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
    /// Bytes that an element has at most.
    widest: usize,
    /// Most units ahead that were ever asked for.
    deepest: usize,
    account: Account,
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

/// How much a gather matters.
#[derive(Clone, Copy)]
enum Want<'a> {
    /// The unit is about to run.
    Now,
    /// It will run, after the unit that runs and then `sooner`.
    Ahead { present: usize, sooner: &'a [usize] },
}

impl AllGatherPipeline {
    /// `units`: the root first.
    pub(crate) fn new(
        comm: Arc<dyn Communicator>,
        streams: Streams,
        tracer: Arc<Tracer>,
        account: &Account,
        options: GatherOptions,
        units: Vec<GatherUnit>,
        groups: &[GroupBuffers],
    ) -> Self {
        let sharded = options.strategy.shards_params();
        let shapes = units.iter().map(|unit| {
            let shape = |&group: &usize| (groups[group].layout.key.dtype, groups[group].layout.size);
            if sharded { unit.groups.iter().map(shape).collect() } else { Vec::new() }
        });
        let widest = groups.iter().map(|group| group.layout.key.dtype.size()).max().unwrap_or(0);
        let pool = Pool::new(
            account.clone(),
            Category::GatherPool,
            shapes.collect(),
            |unit| unit == 0 || matches!(units[unit].reshard, Reshard::Never),
            options.limit(widest),
            options.double_buffer,
        );
        let parts =
            |unit: &GatherUnit| unit.groups.iter().map(|&group| groups[group].layout.parts()).collect();
        let pool = pool.in_pieces(units.iter().map(parts).collect());
        let units = units.into_iter().map(|GatherUnit { path, groups: buckets, reshard }| UnitWeights {
            path,
            numel: buckets.iter().map(|&group| groups[group].layout.size).sum(),
            full: if sharded {
                Vec::new()
            } else {
                buckets.iter().map(|&group| groups[group].model_weight.data().clone()).collect()
            },
            groups: buckets,
            built: reshard.clone(),
            was_kept: matches!(reshard, Reshard::Never),
            reshard,
            expected: false,
            kept: Vec::new(),
            status: Status::Ready,
            lease: None,
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
            widest,
            deepest: options.prefetch.deepest(),
            account: account.clone(),
            units: units.collect(),
            options,
            forward_order: Order::default(),
            backward_order: Order::default(),
            clock: 0,
        };
        pipeline.mark_sharded(Change::Loaded(None));
        pipeline
    }

    /// Has the buffers of the root and of units that are alike in memory that stays, registered with the communicators that
    /// gather into them, and the shards with that of the outer ranks, if these gather parts of them. To be called on all ranks before the first gather.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if the buffers come and go or the communicator registers nothing; those of
    /// [`Communicator::register`].
    pub(crate) fn register_pool(
        &mut self,
        groups: &[GroupBuffers],
        how: Registration,
    ) -> Result<(), CommError> {
        if let Some(outer) = &self.options.outer {
            let trainable = groups.iter().filter(|group| group.layout.key.requires_grad);
            register_outer(&**outer, how, trainable.map(|group| group.model_weight.data()))?;
        }
        settle(&mut self.pool, &*self.comm)?;
        register(&self.pool, &*self.comm, how, |_| true)?;
        let mut known: Vec<&Arc<dyn Communicator>> = Vec::new();
        for unit in &self.units {
            let Reshard::Within(neighbours) = &unit.reshard else { continue };
            if known.iter().any(|known| Arc::ptr_eq(known, neighbours)) {
                continue;
            }
            known.push(neighbours);
            let within = |unit: usize| match &self.units[unit].reshard {
                Reshard::Within(other) => Arc::ptr_eq(neighbours, other),
                Reshard::Always | Reshard::Never => false,
            };
            register(&self.pool, &**neighbours, how, within)?;
        }
        Ok(())
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
            self.launch(groups, unit, Want::Now, moment)?;
        }
        self.units[unit].users += 1;
        if pass == Some(Pass::Backward) {
            self.units[unit].expected = false;
        }
        if let Some(pass) = pass {
            self.prefetch(groups, unit, pass, moment)?;
        }
        self.wait(unit)?;
        Ok(self.units[unit].full.clone())
    }

    /// Starts the unit's gather, unless its weights are whole or on their way: for those who know better what
    /// comes next.
    pub(crate) fn start(
        &mut self,
        groups: &[GroupBuffers],
        unit: usize,
        moment: Moment,
    ) -> Result<(), CommError> {
        if matches!(self.units[unit].status, Status::Sharded) {
            self.launch(groups, unit, Want::Now, moment)
        } else {
            Ok(())
        }
    }

    /// Waits, in stream order, for a gather of the unit that is under way.
    pub(crate) fn wait(&mut self, unit: usize) -> Result<(), CommError> {
        if let Status::InFlight(event) = &self.units[unit].status {
            self.streams.compute.wait(event)?;
            self.units[unit].status = Status::Ready;
        }
        Ok(())
    }

    /// The forward that uses the unit now has a backward to come.
    pub(crate) fn expect_backward(&mut self, unit: usize) {
        self.units[unit].expected = true;
    }

    /// No backward is to come, of no unit.
    pub(crate) fn expect_nothing(&mut self) {
        for unit in &mut self.units {
            unit.expected = false;
            unit.kept.clear();
        }
    }

    /// Sets how many units are gathered ahead, and so how many may be there at a time.
    pub(crate) fn set_prefetch(&mut self, prefetch: Prefetch) {
        self.options.prefetch = prefetch;
        self.deepest = self.deepest.max(prefetch.deepest());
        self.pool.set_limit(self.options.limit(self.widest));
    }

    /// How many units are gathered ahead.
    pub(crate) fn prefetch_depths(&self) -> Prefetch {
        self.options.prefetch
    }

    /// Most units ahead that were ever asked for.
    pub(crate) fn deepest(&self) -> usize {
        self.deepest
    }

    /// The unit's full weights are in use.
    pub(crate) fn is_in_use(&self, unit: usize) -> bool {
        self.units[unit].users > 0
    }

    /// One use of the unit's full weights is over.
    pub(crate) fn release(&mut self, unit: usize) -> Result<(), CommError> {
        self.clock += 1;
        let weights = &mut self.units[unit];
        weights.users -= 1;
        weights.last_used = self.clock;
        let keep = weights.expected && matches!(weights.reshard, Reshard::Never);
        if weights.users == 0 && !self.options.double_buffer && !keep {
            self.evict(unit)?;
        }
        // Units inside this one may have been kept beside it.
        while self.idle().0 > self.units_at_a_time()
            && let Some(victim) = self.victim(Want::Now)
        {
            self.evict(victim)?;
        }
        Ok(())
    }

    /// Takes the unit's full weights out of the pool, and frees their memory if no other unit shares it, whatever a backward
    /// may need still. False if they are in use.
    pub(crate) fn reshard(&mut self, unit: usize) -> Result<bool, CommError> {
        if self.units[unit].users > 0 {
            return Ok(false);
        }
        self.evict(unit)?;
        self.pool.free_alone(unit);
        Ok(true)
    }

    /// Sets what the unit does with its whole weights between forward and backward, and gives them up; groups of ranks are
    /// those that it was made with. False if its weights are in use.
    pub(crate) fn set_reshard(&mut self, unit: usize, mode: ReshardAfterForward) -> Result<bool, CommError> {
        if !self.reshard(unit)? {
            return Ok(false);
        }
        let weights = &mut self.units[unit];
        weights.kept.clear();
        weights.reshard = match mode {
            _ if !self.options.strategy.shards_params() => Reshard::Always,
            ReshardAfterForward::Always => Reshard::Always,
            ReshardAfterForward::Never => Reshard::Never,
            ReshardAfterForward::Ranks(_) => weights.built.clone(),
        };
        let keeps = matches!(weights.reshard, Reshard::Never);
        weights.was_kept |= keeps;
        self.pool.set_alone(unit, keeps);
        Ok(true)
    }

    /// The unit was told to keep its whole weights between forward and backward, now or before.
    pub(crate) fn was_kept(&self, unit: usize) -> bool {
        self.units[unit].was_kept
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

    /// The shards have changed: what was gathered is out of date, and given up.
    pub(crate) fn give_up(&mut self, change: Change) -> Result<(), CommError> {
        self.reset()?;
        self.mark_sharded(change);
        Ok(())
    }

    fn mark_sharded(&mut self, change: Change) {
        if self.options.strategy.shards_optim() || self.options.outer.is_some() {
            for (unit, weights) in self.units.iter_mut().enumerate() {
                weights.status = Status::Sharded;
                weights.expected = false;
                weights.kept.clear();
                match change {
                    Change::Step => weights.outer_stale = true,
                    Change::Loaded(loaded) if loaded.is_none_or(|loaded| loaded == unit) => {
                        (weights.frozen_gathered, weights.outer_stale) = (false, false);
                    }
                    Change::Loaded(_) => {}
                }
            }
        }
    }

    /// The units whose full weights occupy memory of the pool now.
    pub(crate) fn gathered(&self) -> impl Iterator<Item = usize> {
        self.units.iter().enumerate().filter(|(_, unit)| unit.lease.is_some()).map(|(unit, _)| unit)
    }

    fn order(&mut self, pass: Pass) -> &mut Order {
        match pass {
            Pass::Forward => &mut self.forward_order,
            Pass::Backward => &mut self.backward_order,
        }
    }

    fn prefetch(
        &mut self,
        groups: &[GroupBuffers],
        present: usize,
        pass: Pass,
        moment: Moment,
    ) -> Result<(), CommError> {
        let depth = match pass {
            Pass::Forward => self.options.prefetch.forward,
            Pass::Backward => self.options.prefetch.backward,
        };
        let next: Vec<usize> = self.order(pass).upcoming().take(depth).collect();
        for (nearer, &unit) in next.iter().enumerate() {
            if matches!(self.units[unit].status, Status::Sharded) {
                let want = Want::Ahead { present, sooner: &next[..nearer] };
                self.launch(groups, unit, want, moment)?;
            }
        }
        Ok(())
    }

    fn units_at_a_time(&self) -> usize {
        self.options.limit(self.widest).units
    }

    /// Number and elements of the units that have room in the pool and are not in use.
    fn idle(&self) -> (usize, usize) {
        let idle = self.units.iter().enumerate().filter(|&(unit, weights)| {
            weights.lease.is_some() && weights.users == 0 && self.pool.is_shared(unit)
        });
        idle.fold((0, 0), |(units, numel), (_, weights)| (units + 1, numel + weights.numel))
    }

    /// Sees to it that there is room for `unit`, by giving up units that are not in use. False if there is none for a
    /// prefetch, which takes none from a unit that is needed sooner, or waits to be used. A unit that is about to run
    /// always finds room: what is in use then is around it.
    fn make_room(&mut self, unit: usize, want: Want<'_>) -> Result<bool, CommError> {
        if !self.pool.is_shared(unit) {
            return Ok(true);
        }
        // The unit itself, and the one that runs meanwhile.
        let (mut units, mut numel) = (1, self.units[unit].numel);
        if let Want::Ahead { present, .. } = want
            && self.pool.is_shared(present)
        {
            (units, numel) = (units + 1, numel + self.units[present].numel);
        }
        loop {
            let (idle, idle_numel) = self.idle();
            let in_budget = self.options.budget.is_none_or(|budget| idle_numel + numel <= budget);
            if idle + units <= self.units_at_a_time() && in_budget {
                return Ok(true);
            }
            match self.victim(want) {
                Some(victim) => self.evict(victim)?,
                None => return Ok(matches!(want, Want::Now)),
            }
        }
    }

    /// Starts the unit's gather, if there is room.
    fn launch(
        &mut self,
        groups: &[GroupBuffers],
        unit: usize,
        want: Want<'_>,
        moment: Moment,
    ) -> Result<(), CommError> {
        if self.options.strategy.shards_params() {
            if !self.make_room(unit, want)? {
                return Ok(());
            }
            let lease = self.pool.acquire(unit)?;
            let weights = &mut self.units[unit];
            weights.full = lease.iter().flat_map(Lease::buffers).cloned().collect();
            weights.lease = lease;
        }
        self.launch_outer(groups, unit, moment)?;
        if !self.units[unit].kept.is_empty() {
            return self.launch_within(unit, moment);
        }
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
        let at_once = if unit == 0 && self.options.split_root { 1 } else { parts.len().max(1) };
        for parts in parts.chunks(at_once) {
            self.tracer.enqueue(&**gather, "all-gather", "all-gather", path, || {
                self.comm.all_gather(&**gather, moment.tag(path), parts.to_vec())
            })?;
        }
        let event = gather.record();
        let weights = &mut self.units[unit];
        (weights.status, weights.frozen_gathered) = (Status::InFlight(event), true);
        Ok(())
    }

    /// Gathers, within a group of neighbours, what they have kept of the weights since the forward.
    fn launch_within(&mut self, unit: usize, moment: Moment) -> Result<(), CommError> {
        let weights = &mut self.units[unit];
        let Reshard::Within(neighbours) = &weights.reshard else { return Ok(()) };
        let kept = std::mem::take(&mut weights.kept);
        let parts = kept.iter().cloned().zip(&weights.full);
        let parts: Vec<Gather> = parts.map(|(send, recv)| Gather { send, recv: recv.clone() }).collect();
        let (gather, path) = (&self.streams.gather, &weights.path);
        gather.wait(&self.streams.compute.record())?;
        self.tracer.enqueue(&**gather, "all-gather", "all-gather", path, || {
            neighbours.all_gather(&**gather, moment.tag(path), parts)
        })?;
        // SAFETY: the compute stream has written them before the gather, which is the last to read them, on this stream.
        unsafe { gather.retire(&kept) };
        weights.status = Status::InFlight(gather.record());
        Ok(())
    }

    /// Completes the shards of all units, where an optimizer step has left them to other outer ranks, and makes the
    /// compute stream wait for that. All ranks must call it alike.
    pub(crate) fn complete_shards(
        &mut self,
        groups: &[GroupBuffers],
        moment: Moment,
    ) -> Result<(), CommError> {
        if self.options.outer.is_none() || self.units.iter().all(|unit| !unit.outer_stale) {
            return Ok(());
        }
        for unit in 0..self.units.len() {
            self.launch_outer(groups, unit, moment)?;
        }
        self.streams.compute.wait(&self.streams.gather.record())
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

    /// A unit that may be given up: the one used longest ago, or for a unit that is about to run one that waits to be
    /// used.
    fn victim(&self, want: Want<'_>) -> Option<usize> {
        let candidates = self.units.iter().enumerate().filter(|&(other, weights)| {
            let spare = match want {
                Want::Now => true,
                Want::Ahead { sooner, .. } => {
                    matches!(weights.status, Status::Ready) && !sooner.contains(&other)
                }
            };
            weights.lease.is_some() && weights.users == 0 && spare && self.pool.is_shared(other)
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
        if let Reshard::Within(neighbours) = &weights.reshard
            && weights.expected
            && weights.kept.is_empty()
        {
            let (rank, ranks) = (neighbours.rank(), neighbours.size());
            for slice in &full {
                let len = slice.len() / ranks;
                // SAFETY: it is written here, on the compute stream, and then only read, by gathers: those begin when
                // the compute stream has passed their launch.
                let kept = unsafe { self.account.allocate(Category::GatherPool, slice.dtype(), len) }?;
                cast(&*self.streams.compute, &slice.range(rank * len..(rank + 1) * len), &kept)?;
                weights.kept.push(kept);
            }
        }
        let Some(lease) = weights.lease.take() else {
            return Ok(());
        };
        if self.options.poison {
            for slice in full {
                fill(&*self.streams.compute, &slice, Fill::Poison)?;
            }
        }
        // A gather into the same memory begins when the compute stream has passed its launch.
        self.pool.release(lease);
        Ok(())
    }
}
