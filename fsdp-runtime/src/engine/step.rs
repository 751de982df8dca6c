//! The step that is being taken: what changes while a model is trained.
//!
//! A step begins when the one before is over, and ends in one of two ways: [`Step::finish`] or [`Step::abort`]. These are
//! the only places that reset anything.

use candle_core::Tensor;
use parking_lot::MutexGuard;

use crate::comm::{CommError, Phase, Tag, step_words};
use crate::engine::api::unitless::Unitless;
use crate::engine::io::buffers::BufferValues;
use crate::engine::optim::tokens::TokenCount;
use crate::engine::schedule::{AllGatherPipeline, Change, GradReducePipeline, Moment, Prefetch, Sync, Units};
use crate::engine::unit::root_parts::{RootOrder, RootPass};
use crate::engine::unit::weights::{self, Spoilt};
use crate::engine::{Ctx, NonFinite, ParamId, Table, UnitId};
use crate::error::{Error, Result};
use crate::random::RandomKey;

/// The step, locked. Who runs code of the user or waits for other ranks unlocks it meanwhile
/// ([`MutexGuard::unlocked`]): that code may come back, and what it drops may.
pub(crate) type Locked<'a> = MutexGuard<'a, Step>;

/// What the rank is doing, with what exists only meanwhile. An optimizer's step is a [`DueStep`](crate::engine::optim::sharded::DueStep).
pub(crate) enum Running {
    Nothing,
    Forward,
    Backward(Backward),
}

impl Running {
    pub(crate) fn backward(&mut self) -> Option<&mut Backward> {
        match self {
            Running::Backward(backward) => Some(backward),
            Running::Nothing | Running::Forward => None,
        }
    }
}

/// A backward of the whole model.
pub(crate) struct Backward {
    /// It has come to a unit of this model.
    pub reached: bool,
    /// An update rule has a unit's weights: no unit can be entered until it gives them back.
    pub lent: bool,
    /// What of the root has come so far.
    pub root: RootPass,
}

/// What is known of the gradients that came since the last optimizer step.
pub(crate) struct Gradients {
    /// Parameters that got one.
    pub received: Table<ParamId, bool>,
    pub tokens: TokenCount,
    pub factors: Factors,
    /// Those of the backwards, without their graphs.
    pub losses: Vec<Tensor>,
    /// A backward has ended.
    pub had_backward: bool,
}

/// What was computed from the gradients as they are.
#[derive(Clone, Copy)]
pub(crate) struct Factors {
    /// Factor of the main gradients, from clipping and from `unscale`; applied by the optimizer.
    pub scale: f32,
    /// What undoes the scale of the loss, once a loss scaler has said so.
    pub unscale: Option<f64>,
    /// Global norm of the main gradients as they are, if it is known.
    pub norm: Option<f64>,
    /// What the last clipping says of gradients that are not finite.
    pub non_finite: Option<NonFinite>,
}

impl Factors {
    pub(crate) const NONE: Factors = Factors { scale: 1.0, unscale: None, norm: None, non_finite: None };
}

impl Gradients {
    fn none(params: usize) -> Gradients {
        Gradients {
            received: vec![false; params].into(),
            tokens: TokenCount::default(),
            factors: Factors::NONE,
            losses: Vec::new(),
            had_backward: false,
        }
    }

    /// None has come since the last optimizer step.
    fn clear(&mut self) {
        self.received.iter_mut().for_each(|received| *received = false);
        self.tokens = TokenCount::default();
        self.factors = Factors::NONE;
        self.losses.clear();
        self.had_backward = false;
    }
}

/// Forwards whose backward is to come.
#[derive(Default)]
pub(crate) struct Pending {
    /// Training forwards of the whole model.
    pub forwards: usize,
    /// The version of the weights that they saw, if there are any.
    pub version: Option<u64>,
    /// Counts the times that all were given up.
    pub given_up: u64,
}

/// What changes while a model is trained.
pub(crate) struct Step {
    pub number: u64,
    /// Seed of the random streams.
    pub seed: u64,
    pub running: Running,
    pub units: Units,
    pub gather: AllGatherPipeline,
    pub reduce: GradReducePipeline,
    pub gradients: Gradients,
    pub pending: Pending,
    /// Training forwards that ran no unit, which would notice their backward.
    pub unitless: Unitless,
    /// The next backward is the last of its step, as the program has said.
    last_microbatch: bool,
    /// Guards of `no_sync` that are alive.
    unsynced: usize,
    /// A microbatch was run that reduces nothing.
    pub kept_gradients: bool,
    /// Training forwards since the last optimizer step.
    forwards: u64,
    /// Global index of the first sample of the next training forward, if it was said.
    pub first_sample: Option<u64>,
    /// The root is unsharded from a forward on, until its backward.
    pub root_held: bool,
    /// Where in a backward the parts of the root are reduced.
    pub root_order: RootOrder,
    /// What a program has done to a parameter's tensor. Until it is undone nothing is computed.
    pub spoilt: Option<Spoilt>,
    /// Times that units were made whole.
    pub entered: u64,
    /// Counts changes of the weights: a backward must see those of its forward.
    pub weights_version: u64,
    /// What the buffers held when a recomputed forward last began: forwards share what does not change between them.
    pub seen_buffers: BufferValues,
    /// The last change of the weights or of the step's gradients that was not their reduction, in words.
    event: String,
    /// The first error that has to travel through the tensor library, whose own error type holds only text.
    pub failure: Option<Error>,
}

impl Step {
    /// The first step of a model.
    pub(crate) fn new(
        ctx: &Ctx,
        units: Units,
        gather: AllGatherPipeline,
        reduce: GradReducePipeline,
    ) -> Step {
        Step {
            number: 0,
            seed: ctx.config.seed,
            running: Running::Nothing,
            root_order: RootOrder::of(&units),
            units,
            gather,
            reduce,
            gradients: Gradients::none(ctx.params.len()),
            pending: Pending::default(),
            unitless: Unitless::default(),
            last_microbatch: true,
            unsynced: 0,
            kept_gradients: false,
            forwards: 0,
            first_sample: None,
            root_held: false,
            spoilt: None,
            entered: 0,
            weights_version: 0,
            seen_buffers: BufferValues::default(),
            event: "before the first step".into(),
            failure: None,
        }
    }

    /// The optimizer has taken the step: the next one begins, with no gradients.
    pub(crate) fn finish(&mut self) {
        self.reduce.clear(&mut self.units);
        self.gradients.clear();
        self.forwards = 0;
        self.number += 1;
    }

    /// Training goes on where a checkpoint was saved.
    pub(crate) fn resume(&mut self, number: u64, seed: u64) {
        (self.number, self.seed) = (number, seed);
    }

    /// Ends whatever was cut short, so that the step can begin anew: sinks closed, units sharded, gradients forgotten.
    pub(crate) fn abort(&mut self, ctx: &Ctx) -> Result<(), CommError> {
        for param in &ctx.params {
            param.sink.close();
        }
        // The state remembers an error.
        let _ = weights::release_root(ctx, self);
        weights::take_back_stuck(ctx, self);
        self.running = Running::Nothing;
        let finished = self.forget_gradients();
        self.forwards = 0;
        (self.pending.version, self.pending.forwards) = (None, 0);
        self.unitless.forget();
        self.expect_nothing();
        self.gather.expect_nothing(&mut self.units);
        self.gather.reset(&mut self.units)?;
        finished
    }

    /// No gradient of this step counts, reduced or not. Forwards whose backward is to come stay good.
    pub(crate) fn forget_gradients(&mut self) -> Result<(), CommError> {
        self.reduce.abandon(&mut self.units);
        let finished = self.reduce.finish();
        self.reduce.clear(&mut self.units);
        self.gradients.clear();
        finished
    }

    /// Whatever forward has not had its backward yet is void, even if its loss is still held.
    fn expect_nothing(&mut self) {
        self.pending.given_up += 1;
        self.units.iter_mut().for_each(|unit| unit.grads.pending = 0);
    }

    /// The shards have changed: whatever was gathered is given up, and a forward whose backward is still to come is
    /// void.
    pub(crate) fn weights_changed(&mut self, ctx: &Ctx, change: Change) -> Result<(), CommError> {
        // The state remembers an error.
        let _ = weights::release_root(ctx, self);
        self.gather.give_up(&mut self.units, change)?;
        self.weights_version += 1;
        self.expect_nothing();
        Ok(())
    }

    /// A training forward is complete, and its backward is to come; it may have run no unit (`unitless`).
    pub(crate) fn count_forward(&mut self, unitless: bool) {
        let version = self.weights_version;
        if self.pending.version.replace(version) != Some(version) {
            self.pending.forwards = 0;
        }
        self.pending.forwards += 1;
        if unitless {
            self.unitless.end(version);
        }
        // Only of a forward that counts: others leave the random numbers as they were.
        self.forwards += 1;
        self.first_sample = None;
    }

    /// A backward is complete.
    pub(crate) fn count_backward(&mut self) {
        self.gradients.had_backward = true;
        self.pending.forwards -= 1;
        if self.pending.forwards == 0 {
            self.pending.version = None;
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        matches!(self.running, Running::Nothing)
    }

    /// The backward that is running.
    pub(crate) fn backward(&mut self) -> Option<&mut Backward> {
        self.running.backward()
    }

    /// Which pass is under way: recomputation is part of the backward.
    pub(crate) fn phase(&self) -> Phase {
        if matches!(self.running, Running::Backward(_)) { Phase::Backward } else { Phase::Forward }
    }

    pub(crate) fn moment(&self, phase: Phase) -> Moment {
        Moment { phase, step: self.number }
    }

    pub(crate) fn tag(&self, what: &str, phase: Phase) -> Tag {
        Tag { unit: what.into(), phase, step: self.number }
    }

    /// What the random numbers of the forward that begins depend on.
    pub(crate) fn random(&self, ctx: &Ctx) -> RandomKey {
        let (rank, ranks) = (ctx.comm.rank() as u64, ctx.comm.size() as u64);
        let own = (self.forwards * ranks + rank) << 32;
        RandomKey::root(self.seed, self.number, self.first_sample.unwrap_or(own))
    }

    /// Of each unit, whether the main gradients hold a contribution of this step.
    pub(crate) fn with_gradient(&self) -> Table<UnitId, bool> {
        self.units.iter().map(|unit| unit.grads.has_gradient()).collect()
    }

    /// Notes the last thing that has changed the weights or given up gradients, as `after step 3 by ..`: what every rank must
    /// have done alike, although no collective carries it. The communicators compare it.
    pub(crate) fn note_event(&mut self, ctx: &Ctx, event: String) {
        self.event = event;
        self.note(ctx);
    }

    /// [`Step::note_event`] of what was done in this step.
    pub(crate) fn note_change(&mut self, ctx: &Ctx, what: impl std::fmt::Display) {
        self.note_event(ctx, format!("after {what} in {}", step_words(self.number)));
    }

    /// What is reduced after the next backward.
    pub(crate) fn sync(&self) -> Sync {
        match (self.unsynced, self.last_microbatch) {
            (1.., _) => Sync::Nothing,
            (0, false) => Sync::Microbatch,
            (0, true) => Sync::Step,
        }
    }

    /// Sets whether the next backward is the last of its step, where no guard keeps it from reducing.
    pub(crate) fn set_last_microbatch(&mut self, ctx: &Ctx, last: bool) {
        self.last_microbatch = last;
        self.note(ctx);
    }

    /// From now on backwards reduce nothing, until [`Self::end_no_sync`] was called as often.
    pub(crate) fn begin_no_sync(&mut self, ctx: &Ctx) {
        self.unsynced += 1;
        self.kept_gradients = true;
        self.note(ctx);
    }

    pub(crate) fn end_no_sync(&mut self, ctx: &Ctx) {
        self.unsynced -= 1;
        self.note(ctx);
    }

    /// To be called when anything of it has changed.
    pub(crate) fn note(&self, ctx: &Ctx) {
        let microbatch = match self.sync() {
            Sync::Step => "the last microbatch",
            Sync::Microbatch => "a microbatch that is not the last",
            Sync::Nothing => "a microbatch under `no_sync`",
        };
        let Prefetch { forward, backward } = self.gather.prefetch_depths();
        let ahead = if (forward, backward) == (ctx.config.prefetch, ctx.config.prefetch) {
            String::new()
        } else {
            format!(", with {forward} units gathered ahead in forwards and {backward} in backwards")
        };
        let state = format!("{}, in {microbatch}{ahead}", self.event);
        for comm in [&ctx.comm, &ctx.shard_comm, &ctx.outer_comm] {
            comm.note(&state);
        }
    }
}
