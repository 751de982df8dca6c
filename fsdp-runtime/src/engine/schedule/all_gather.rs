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

use super::super::ids::{BucketId, Id, Table, UnitId};
use super::registration::{register, settle};
use super::weights::How;
use super::{Change, Moment, Order, Reshard, Resources, Unit, Units, Weights};
use crate::comm::{CommError, Communicator, Registration};
use crate::layout::PoolLimit;
use crate::memory::{Category, Pool};
use crate::spec::{ReshardAfterForward, Strategy};

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

    /// Whole weights have to be gathered after every change.
    fn must_gather(&self) -> bool {
        self.strategy.shards_optim() || self.outer.is_some()
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

pub(crate) struct AllGatherPipeline {
    comm: Arc<dyn Communicator>,
    resources: Arc<Resources>,
    options: GatherOptions,
    pool: Pool,
    /// Bytes that an element has at most.
    widest: usize,
    /// Most units ahead that were ever asked for.
    pub(crate) deepest: usize,
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
    Ahead { present: UnitId, sooner: &'a [UnitId] },
}

impl AllGatherPipeline {
    /// The schedule, and the weights of each unit, which does as `reshard` says.
    pub(crate) fn new(
        comm: Arc<dyn Communicator>,
        options: GatherOptions,
        resources: &Arc<Resources>,
        reshard: Table<UnitId, Reshard>,
    ) -> (Self, Vec<Weights>) {
        let buckets = &resources.buckets;
        let sharded = options.strategy.shards_params();
        let shape = |&bucket: &BucketId| {
            let layout = &buckets[bucket].layout;
            (layout.key.dtype, layout.size)
        };
        let shapes = |unit: &Unit| match sharded {
            true => unit.buckets.iter().map(shape).collect(),
            false => Vec::new(),
        };
        let parts = |unit: &Unit| unit.buckets.iter().map(|&bucket| buckets[bucket].layout.parts()).collect();
        let widest = buckets.iter().map(|bucket| bucket.layout.key.dtype.size()).max().unwrap_or(0);
        let pool = Pool::new(
            resources.account.clone(),
            Category::GatherPool,
            resources.units.iter().map(shapes).collect(),
            |unit| {
                let unit = UnitId::new(unit);
                unit == UnitId::ROOT || matches!(reshard[unit], Reshard::Never)
            },
            options.limit(widest),
            options.double_buffer,
        );
        let pool = pool.in_pieces(resources.units.iter().map(parts).collect());
        let held = |unit: &Unit| match sharded {
            true => Vec::new(),
            false => unit.buckets.iter().map(|&bucket| buckets[bucket].model_weight.data().clone()).collect(),
        };
        let weights = |(id, unit): (UnitId, &Unit)| {
            let mut weights = Weights::new(reshard[id].clone(), held(unit));
            if options.must_gather() {
                weights.mark_sharded(id, Change::Loaded(None));
            }
            weights
        };
        let weights = resources.units.entries().map(weights).collect();
        let pipeline = AllGatherPipeline {
            comm,
            resources: resources.clone(),
            pool,
            widest,
            deepest: options.prefetch.deepest(),
            options,
            forward_order: Order::default(),
            backward_order: Order::default(),
            clock: 0,
        };
        (pipeline, weights)
    }

    /// Has the buffers of the root and of units that are alike in memory that stays, registered with the communicators that
    /// gather into them, and the shards with that of the outer ranks, if these gather parts of them. To be called on all ranks before the first gather.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if the buffers come and go or the communicator registers nothing; those of
    /// [`Communicator::register`].
    pub(crate) fn register_pool(&mut self, units: &Units, how: Registration) -> Result<(), CommError> {
        if let Some(outer) = &self.options.outer {
            let trainable = self.resources.buckets.iter().filter(|bucket| bucket.layout.key.requires_grad);
            register(&**outer, how, trainable.map(|bucket| bucket.model_weight.data().clone()).collect())?;
        }
        settle(&mut self.pool, &*self.comm)?;
        register(&*self.comm, how, self.pool.buffers_of(|_| true))?;
        let mut known: Vec<&Arc<dyn Communicator>> = Vec::new();
        for unit in units {
            let Reshard::Within(neighbours) = &unit.weights.reshard else { continue };
            if known.iter().any(|known| Arc::ptr_eq(known, neighbours)) {
                continue;
            }
            known.push(neighbours);
            let within = |unit: usize| match &units[UnitId::new(unit)].weights.reshard {
                Reshard::Within(other) => Arc::ptr_eq(neighbours, other),
                Reshard::Always | Reshard::Never => false,
            };
            register(&**neighbours, how, self.pool.buffers_of(within))?;
        }
        Ok(())
    }

    /// A use of the unit's full weights begins ([`Weights::full`]): they are valid on the compute stream from now until
    /// [`Self::release`]. Launches the gather if it is not under way, then those of the next units of the
    /// pass (`None`: a unit inside one that is recomputed, which foretells nothing). After an error there is no use.
    pub(crate) fn acquire(
        &mut self,
        units: &mut Units,
        unit: UnitId,
        pass: Option<Pass>,
        moment: Moment,
    ) -> Result<(), CommError> {
        if let Some(pass) = pass
            && unit != UnitId::ROOT
        {
            self.order(pass).advance(unit);
        }
        self.start(units, unit, moment)?;
        units[unit].weights.uses += 1;
        if pass == Some(Pass::Backward) {
            units[unit].weights.expected = false;
        }
        let ahead = pass.map_or(Ok(()), |pass| self.prefetch(units, unit, pass, moment));
        let weights = &mut units[unit].weights;
        ahead.and_then(|()| weights.wait(&*self.resources.streams.compute)).inspect_err(|_| weights.uses -= 1)
    }

    /// Starts the unit's gather, unless its weights are whole or on their way.
    pub(crate) fn start(&mut self, units: &mut Units, unit: UnitId, moment: Moment) -> Result<(), CommError> {
        if units[unit].weights.is_sharded() { self.launch(units, unit, Want::Now, moment) } else { Ok(()) }
    }

    /// No backward is to come, of no unit.
    pub(crate) fn expect_nothing(&mut self, units: &mut Units) {
        units.iter_mut().for_each(|unit| unit.weights.expect_nothing());
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

    /// One use of the unit's full weights is over.
    pub(crate) fn release(&mut self, units: &mut Units, unit: UnitId) -> Result<(), CommError> {
        self.clock += 1;
        let weights = &mut units[unit].weights;
        weights.uses -= 1;
        weights.last_used = self.clock;
        let keep = weights.expected && matches!(weights.reshard, Reshard::Never);
        if weights.uses == 0 && !self.options.double_buffer && !keep {
            self.evict(units, unit)?;
        }
        // Units inside this one may have been kept beside it.
        while self.idle(units).0 > self.units_at_a_time()
            && let Some(victim) = self.victim(units, Want::Now)
        {
            self.evict(units, victim)?;
        }
        Ok(())
    }

    /// Takes the unit's full weights out of the pool, and frees their memory if no other unit shares it, whatever a backward
    /// may need still. False if they are in use.
    pub(crate) fn reshard(&mut self, units: &mut Units, unit: UnitId) -> Result<bool, CommError> {
        if units[unit].weights.uses > 0 {
            return Ok(false);
        }
        self.evict(units, unit)?;
        self.pool.free_alone(unit.index());
        Ok(true)
    }

    /// Sets what the unit does with its whole weights between forward and backward, and gives them up; groups of ranks are
    /// those that it was made with. False if its weights are in use.
    pub(crate) fn set_reshard(
        &mut self,
        units: &mut Units,
        unit: UnitId,
        mode: ReshardAfterForward,
    ) -> Result<bool, CommError> {
        if !self.reshard(units, unit)? {
            return Ok(false);
        }
        let sharded = self.options.strategy.shards_params();
        let weights = &mut units[unit].weights;
        weights.set_reshard(if sharded { mode } else { ReshardAfterForward::Always });
        self.pool.set_alone(unit.index(), matches!(weights.reshard, Reshard::Never));
        Ok(true)
    }

    /// Takes all full weights that are not in use out of the pool: after evaluation, before the weights
    /// change, after an error.
    pub(crate) fn reset(&mut self, units: &mut Units) -> Result<(), CommError> {
        for unit in units.ids() {
            if units[unit].weights.uses == 0 {
                self.evict(units, unit)?;
            }
        }
        Ok(())
    }

    /// The shards have changed: what was gathered is out of date, and given up.
    pub(crate) fn give_up(&mut self, units: &mut Units, change: Change) -> Result<(), CommError> {
        self.reset(units)?;
        if self.options.must_gather() {
            units.ids().for_each(|unit| units[unit].weights.mark_sharded(unit, change));
        }
        Ok(())
    }

    fn order(&mut self, pass: Pass) -> &mut Order {
        match pass {
            Pass::Forward => &mut self.forward_order,
            Pass::Backward => &mut self.backward_order,
        }
    }

    fn prefetch(
        &mut self,
        units: &mut Units,
        present: UnitId,
        pass: Pass,
        moment: Moment,
    ) -> Result<(), CommError> {
        let depth = match pass {
            Pass::Forward => self.options.prefetch.forward,
            Pass::Backward => self.options.prefetch.backward,
        };
        let next: Vec<UnitId> = self.order(pass).upcoming().take(depth).collect();
        for (nearer, &unit) in next.iter().enumerate() {
            if units[unit].weights.is_sharded() {
                let want = Want::Ahead { present, sooner: &next[..nearer] };
                self.launch(units, unit, want, moment)?;
            }
        }
        Ok(())
    }

    fn units_at_a_time(&self) -> usize {
        self.options.limit(self.widest).units
    }

    fn is_shared(&self, unit: UnitId) -> bool {
        self.pool.is_shared(unit.index())
    }

    /// Number and elements of the units that have room in the pool and are not in use.
    fn idle(&self, units: &Units) -> (usize, usize) {
        let idle = units.entries().filter(|&(unit, state)| state.weights.is_idle() && self.is_shared(unit));
        idle.fold((0, 0), |(units, numel), (unit, _)| (units + 1, numel + self.resources.units[unit].numel))
    }

    /// Sees to it that there is room for `unit`, by giving up units that are not in use. False if there is none for a
    /// prefetch, which takes none from a unit that is needed sooner, or waits to be used. A unit that is about to run
    /// always finds room: what is in use then is around it.
    fn make_room(&mut self, units: &mut Units, unit: UnitId, want: Want<'_>) -> Result<bool, CommError> {
        if !self.is_shared(unit) {
            return Ok(true);
        }
        // The unit itself, and the one that runs meanwhile.
        let (mut number, mut numel) = (1, self.resources.units[unit].numel);
        if let Want::Ahead { present, .. } = want
            && self.is_shared(present)
        {
            (number, numel) = (number + 1, numel + self.resources.units[present].numel);
        }
        loop {
            let (idle, idle_numel) = self.idle(units);
            let in_budget = self.options.budget.is_none_or(|budget| idle_numel + numel <= budget);
            if idle + number <= self.units_at_a_time() && in_budget {
                return Ok(true);
            }
            match self.victim(units, want) {
                Some(victim) => self.evict(units, victim)?,
                None => return Ok(matches!(want, Want::Now)),
            }
        }
    }

    /// A unit that may be given up: the one used longest ago, or for a unit that is about to run one that waits to be
    /// used.
    fn victim(&self, units: &Units, want: Want<'_>) -> Option<UnitId> {
        let candidates = units.entries().filter(|&(other, state)| {
            let spare = match want {
                Want::Now => true,
                Want::Ahead { sooner, .. } => state.weights.is_ready() && !sooner.contains(&other),
            };
            state.weights.is_idle() && spare && self.is_shared(other)
        });
        candidates
            .min_by_key(|(_, state)| (state.weights.is_in_flight(), state.weights.last_used))
            .map(|(other, _)| other)
    }

    /// Starts the unit's gather, if there is room.
    fn launch(
        &mut self,
        units: &mut Units,
        unit: UnitId,
        want: Want<'_>,
        moment: Moment,
    ) -> Result<(), CommError> {
        if self.options.strategy.shards_params() {
            if !self.make_room(units, unit, want)? {
                return Ok(());
            }
            units[unit].weights.take(self.pool.acquire(unit.index())?);
        }
        let GatherOptions { strategy, split_root, outer, .. } = &self.options;
        let how = How {
            comm: &*self.comm,
            outer: outer.as_deref(),
            sharded: strategy.shards_optim(),
            in_place: !strategy.shards_params(),
            one_by_one: unit == UnitId::ROOT && *split_root,
        };
        units[unit].weights.gather(&self.resources, &self.resources.units[unit], &how, moment)
    }

    /// Completes the shards of all units, where an optimizer step has left them to other outer ranks, and makes the
    /// compute stream wait for that. All ranks must call it alike.
    pub(crate) fn complete_shards(&mut self, units: &mut Units, moment: Moment) -> Result<(), CommError> {
        let outer = self.options.outer.as_deref();
        if outer.is_none() || units.iter().all(|unit| !unit.weights.outer_stale) {
            return Ok(());
        }
        for (unit, state) in self.resources.units.iter().zip(units.iter_mut()) {
            state.weights.complete_shard(&self.resources, unit, outer, moment)?;
        }
        self.resources.streams.compute.wait(&self.resources.streams.gather.record())
    }

    /// Gives the unit's full weights up. Weights that are kept whole stay.
    fn evict(&mut self, units: &mut Units, unit: UnitId) -> Result<(), CommError> {
        let weights = &mut units[unit].weights;
        if !self.options.strategy.shards_params() {
            return weights.wait(&*self.resources.streams.compute);
        }
        if let Some(lease) = weights.evict(&self.resources, self.options.poison)? {
            // A gather into the same memory begins when the compute stream has passed its launch.
            self.pool.release(lease);
        }
        Ok(())
    }
}
