//! The training-state machine of one rank: enters and leaves units, opens and closes gradient sinks, and
//! drives the two pipelines.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use candle_core::Tensor;
use parking_lot::Mutex;

use super::backward_step::UnitStep;
use super::buffers::BufferValues;
use super::config::{FsdpConfig, NonFinite};
use super::intact::Spoilt;
use super::opened::DETACHED;
use super::root_parts::RootParts;
use super::sink::GradSink;
use super::tokens::TokenCount;
use super::turns::Turns;
use super::unit::Casts;
use super::unitless::Unitless;
use crate::buffer::GroupBuffers;
use crate::comm::{CommError, Communicator, Phase, Tag, without_rank};
use crate::device::Backend;
use crate::error::{Error, Result};
use crate::files::FileLocks;
use crate::layout::ModelLayout;
use crate::memory::{Account, Aliases, Thoroughness, Variable, candle_dtype, names_tombstone};
use crate::mesh::Topology;
use crate::pipeline::{AllGatherPipeline, Change, GradReducePipeline, Moment, Pass, Streams, Sync};
use crate::random::RandomKey;
use crate::spec::ReshardAfterForward;
use crate::trace::{Begun, Tracer};

/// Why a backward is refused after an optimizer step or a load.
pub(crate) const WEIGHTS_CHANGED: &str = "the weights have changed since the forward of this loss (by an optimizer \
     step or `load_weights`): its gradients would mix old activations with new weights; run the forward again";

/// What to do where a pass seems to be under way, but was cut short.
const CUT_SHORT: &str = "If that was cut short, as by a panic that was caught, call `model.reset_step()`, and it can be called again";

/// Index of the root unit.
pub(crate) const ROOT: usize = 0;

/// One physical parameter: where it lives and its tensor, which tied parameters share.
#[derive(Debug)]
pub(crate) struct Slot {
    pub group: usize,
    pub item: usize,
    pub variable: Variable,
    pub sink: GradSink,
    /// Some forward has read it.
    pub read: AtomicBool,
}

/// One communication unit.
#[derive(Debug)]
pub(crate) struct UnitInfo {
    pub path: Arc<str>,
    pub groups: Vec<usize>,
    /// Physical parameters, as indices into the layout's.
    pub params: Vec<usize>,
}

/// What a rank is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TrainingState {
    Idle,
    Forward,
    Backward,
}

#[derive(Default)]
pub(crate) struct UnitState {
    pub users: usize,
    pub aliases: Aliases,
    /// Nobody uses it, but a tensor still has its memory.
    pub stuck: bool,
    /// Forwards of this unit whose backward is still to come.
    pub pending: usize,
    /// A backward of this unit got a gradient that is not all zeros. Looked at in the first step only.
    pub alive: bool,
}

pub(crate) struct State {
    pub gather: AllGatherPipeline,
    pub reduce: GradReducePipeline,
    pub units: Vec<UnitState>,
    pub training: TrainingState,
    pub step: u64,
    /// Seed of the random streams.
    pub seed: u64,
    /// What is reduced after the next backward.
    pub sync: Sync,
    /// The last change of the weights or of the step's gradients that was not their reduction, in words.
    pub event: String,
    /// A microbatch was run that reduces nothing.
    pub kept_gradients: bool,
    /// The root is unsharded from a forward on, until its backward.
    root_held: bool,
    /// What a program has done to a parameter's tensor. Until it is undone nothing is computed.
    pub(super) spoilt: Option<Spoilt>,
    /// Times that units were made whole.
    entered: u64,
    /// Counts changes of the weights: a backward must see those of its forward.
    pub(super) weights_version: u64,
    /// The version the pending forwards saw, if there are any.
    forward_version: Option<u64>,
    /// Training forwards that saw it and whose backward may be to come.
    pending_forwards: usize,
    /// Those that ran no unit, which would notice their backward.
    pub(super) unitless: Unitless,
    /// Parameters that got a gradient since the last optimizer step.
    pub received: Vec<bool>,
    pub tokens: TokenCount,
    /// Counts the times that pending backwards were given up.
    pub expectations: u64,
    /// Global index of the first sample of the next training forward, if it was said.
    pub first_sample: Option<u64>,
    /// Training forwards since the last optimizer step.
    pub forwards: u64,
    /// Factor of the main gradients, from clipping and from [`State::unscale`]; applied by the optimizer.
    pub grad_scale: f32,
    /// What undoes the scale of the loss, once a loss scaler has said so.
    pub unscale: Option<f64>,
    /// Global norm of the main gradients as they are, if it is known.
    pub grad_norm: Option<f64>,
    /// What the last clipping says of gradients that are not finite.
    pub non_finite: Option<NonFinite>,
    /// Those of the backwards since the last optimizer step, without their graphs.
    pub losses: Vec<Tensor>,
    /// Steps units in the backward that is running, if it is to.
    pub unit_step: Option<UnitStep>,
    /// The order in which parts of the root are reduced.
    pub root_parts: RootParts,
    /// The backward that is running has come to a unit.
    pub reached: bool,
    /// A backward has ended since the last optimizer step.
    pub had_backward: bool,
    /// An update rule has a unit's weights, in the backward: no unit can be entered until it gives them back.
    pub lent: bool,
}

impl State {
    /// Whatever forward has not had its backward yet is void, even if its loss is still held.
    fn expect_nothing(&mut self) {
        self.expectations += 1;
        self.units.iter_mut().for_each(|unit| unit.pending = 0);
    }

    /// The gradients have changed or are gone: what was computed from them no longer holds.
    pub(crate) fn forget_factors(&mut self) {
        (self.grad_scale, self.unscale, self.grad_norm, self.non_finite) = (1.0, None, None, None);
    }
}

/// What a rank knows of its sharded model and what never changes.
pub(crate) struct Parts {
    pub id: usize,
    /// The model's buffers, in declaration order.
    pub buffers: Vec<Tensor>,
    /// What they held when a recomputed forward last began: forwards share what does not change between them.
    pub seen_buffers: Mutex<BufferValues>,
    /// The type of the model, for messages.
    pub name: String,
    pub config: FsdpConfig,
    pub mesh: Topology,
    /// All ranks of the mesh.
    pub comm: Arc<dyn Communicator>,
    /// The same, for saving and restoring: beside training, in an order of its own.
    pub checkpoint_comm: Arc<dyn Communicator>,
    /// The order of saves and restores, in the background too.
    pub checkpoint_turns: Arc<Turns>,
    /// The locks of the directories that it saves into.
    pub checkpoint_locks: Arc<FileLocks>,
    /// The ranks that share the shards.
    pub shard_comm: Arc<dyn Communicator>,
    /// The ranks that have the same shard.
    pub outer_comm: Arc<dyn Communicator>,
    pub backend: Arc<dyn Backend>,
    pub streams: Streams,
    pub account: Account,
    pub tracer: Arc<Tracer>,
    pub layout: ModelLayout,
    pub groups: Vec<GroupBuffers>,
    pub units: Vec<UnitInfo>,
    /// By unit: what becomes of its whole weights between forward and backward.
    pub reshard: Vec<ReshardAfterForward>,
    pub slots: Vec<Slot>,
}

/// Everything a rank knows of its sharded model, but the user's module.
pub(crate) struct Engine {
    parts: Parts,
    pub state: Mutex<State>,
    failure: Mutex<Option<Error>>,
}

impl Deref for Engine {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.parts
    }
}

/// A fresh identity for an engine.
pub(crate) fn next_id() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Engine {
    pub(crate) fn new(parts: Parts, gather: AllGatherPipeline, reduce: GradReducePipeline) -> Arc<Engine> {
        let state = State {
            gather,
            reduce,
            units: parts.units.iter().map(|_| UnitState::default()).collect(),
            training: TrainingState::Idle,
            step: 0,
            seed: parts.config.seed,
            sync: Sync::Step,
            event: "before the first step".into(),
            kept_gradients: false,
            root_held: false,
            spoilt: None,
            entered: 0,
            weights_version: 0,
            forward_version: None,
            pending_forwards: 0,
            unitless: Unitless::default(),
            received: vec![false; parts.slots.len()],
            tokens: TokenCount::default(),
            expectations: 0,
            first_sample: None,
            forwards: 0,
            grad_scale: 1.0,
            unscale: None,
            grad_norm: None,
            non_finite: None,
            losses: Vec::new(),
            unit_step: None,
            root_parts: RootParts::default(),
            reached: false,
            had_backward: false,
            lent: false,
        };
        let engine = Arc::new(Engine { parts, state: Mutex::new(state), failure: Mutex::new(None) });
        engine.note_state();
        engine
    }

    pub(crate) fn id(&self) -> usize {
        self.id
    }

    /// The unit of this path; `(root)` and the empty path are the root.
    pub(crate) fn unit_named(&self, path: &str) -> Result<usize> {
        let is_it = |&unit: &usize| self.unit_path(unit) == path || self.unit_name(unit) == path;
        (0..self.units.len()).find(is_it).ok_or_else(|| {
            let known: Vec<&str> = (0..self.units.len()).map(|unit| self.unit_name(unit)).collect();
            Error::Usage(format!("there is no unit `{path}`: the model's are {}", known.join(", ")))
        })
    }

    pub(crate) fn unit_path(&self, unit: usize) -> &str {
        &self.units[unit].path
    }

    /// Path of a unit for messages.
    pub(crate) fn unit_name(&self, unit: usize) -> &str {
        if unit == ROOT { "(root)" } else { &self.units[unit].path }
    }

    /// What is cast at the unit's boundary.
    pub(crate) fn casts(&self, unit: usize) -> Casts {
        let precision = &self.config.precision;
        let weights = self.units[unit].params.first().map(|&param| self.layout.params[param].key.dtype);
        let input = if precision.cast_inputs { weights } else { None };
        Casts { input: input.map(candle_dtype), output: precision.output.map(candle_dtype) }
    }

    /// A span of computation begins.
    pub(crate) fn begin_span(&self, name: &'static str, unit: &Arc<str>) -> Begun {
        self.tracer.begin(&*self.streams.compute, name, unit)
    }

    pub(crate) fn end_span(&self, begun: Begun) {
        self.tracer.compute(&*self.streams.compute, begun);
    }

    pub(crate) fn tag(&self, what: &str, phase: Phase) -> Tag {
        Tag { unit: what.into(), phase, step: self.state.lock().step }
    }

    /// An error inside `unit`, with where and when.
    pub(crate) fn unit_error(&self, unit: usize, phase: Phase, message: impl Into<String>) -> Error {
        let step = self.state.lock().step;
        let (rank, unit) = (self.comm.rank(), self.unit_name(unit).to_string());
        let message = without_rank(rank, &message.into()).to_owned();
        Error::Unit { rank, unit, phase, step, message }
    }

    /// Which pass is under way: recomputation is part of the backward.
    pub(crate) fn phase(&self) -> Phase {
        if self.state.lock().training == TrainingState::Backward { Phase::Backward } else { Phase::Forward }
    }

    /// Keeps the first error that has to travel through the tensor library, whose own error type holds only
    /// text.
    pub(crate) fn note_failure(&self, error: Error) -> candle_core::Error {
        self.failure.lock().get_or_insert_with(|| error.clone());
        error.into()
    }

    /// An error that came out of a module's code: says which unit, unless one inside has said so already.
    pub(crate) fn note_unit_failure(
        &self,
        unit: usize,
        phase: Phase,
        error: candle_core::Error,
    ) -> candle_core::Error {
        if self.failure.lock().is_some() {
            return error;
        }
        let mut message = error.to_string();
        if names_tombstone(&message) {
            message = format!("{message}. {}", self.resharded_parameters());
        }
        self.note_failure(self.unit_error(unit, phase, message))
    }

    /// The error that was kept, if there is one.
    pub(crate) fn noted_failure(&self) -> Option<Error> {
        self.failure.lock().take()
    }

    /// The typed error behind one that came out of the tensor library.
    pub(crate) fn explain(&self, error: candle_core::Error) -> Error {
        self.noted_failure().unwrap_or_else(|| error.into())
    }

    /// A forward of the whole model begins.
    pub(crate) fn begin_forward(self: &Arc<Self>) -> Result<UnitGuard> {
        self.note_thread();
        {
            let mut state = self.state.lock();
            state.check_intact()?;
            if state.training != TrainingState::Idle {
                return Err(Error::Usage(format!(
                    "the model's forward was called inside its own forward or backward. {CUT_SHORT}"
                )));
            }
            state.training = TrainingState::Forward;
            *self.failure.lock() = None;
            state.gather.forward_order.begin();
            state.unitless.begin();
        }
        self.enter(ROOT, Phase::Forward).inspect_err(|_| self.state.lock().training = TrainingState::Idle)
    }

    /// What the random numbers of the forward that begins depend on.
    pub(crate) fn next_forward(&self) -> RandomKey {
        let state = self.state.lock();
        let (rank, ranks) = (self.comm.rank() as u64, self.comm.size() as u64);
        let own = (state.forwards * ranks + rank) << 32;
        RandomKey::root(state.seed, state.step, state.first_sample.unwrap_or(own))
    }

    /// The forward is over. After training the root stays unsharded for the backward; after evaluation
    /// nothing does.
    pub(crate) fn end_forward(&self, root: UnitGuard, training: bool, complete: bool) -> Result<()> {
        let mut root = Some(root);
        {
            let mut state = self.state.lock();
            state.training = TrainingState::Idle;
            let unitless = state.gather.forward_order.is_at_start();
            if complete {
                state.gather.forward_order.end();
            }
            if training && complete {
                let version = state.weights_version;
                if state.forward_version.replace(version) != Some(version) {
                    state.pending_forwards = 0;
                }
                state.pending_forwards += 1;
                if unitless {
                    state.unitless.end(version);
                }
                // Only of a forward that counts: others leave the random numbers as they were.
                state.forwards += 1;
                state.first_sample = None;
            }
            if training && complete && !state.root_held {
                state.root_held = true;
                root.take().expect("taken once").hold();
            }
        }
        root.map_or(Ok(()), UnitGuard::leave)?;
        if !training { Ok(self.state.lock().gather.reset()?) } else { Ok(()) }
    }

    /// Makes the unit's parameters whole until the guard is dropped.
    pub(crate) fn enter(self: &Arc<Self>, unit: usize, phase: Phase) -> Result<UnitGuard> {
        let mut state = self.state.lock();
        let state = &mut *state;
        if state.lent {
            let message = "was entered by the optimizer's rule, which has the weights of a unit: a rule runs no backward";
            let (rank, step) = (self.comm.rank(), state.step);
            let unit = self.unit_name(unit).to_owned();
            return Err(Error::Unit { rank, unit, phase, step, message: message.into() });
        }
        let pass = match (phase, state.training) {
            (Phase::Backward, _) => Some(Pass::Backward),
            (_, TrainingState::Backward) => None,
            _ => Some(Pass::Forward),
        };
        let moment = Moment { phase, step: state.step };
        state.check_intact()?;
        let full = state.gather.acquire(&self.groups, unit, pass, moment)?;
        // Its drop takes the state's lock: it is made when nothing here can fail any more.
        let guard = || UnitGuard { engine: self.clone(), unit, held: false };
        let unit_state = &mut state.units[unit];
        unit_state.users += 1;
        if unit_state.users > 1 {
            return Ok(guard());
        }
        state.entered += 1;
        let thorough = self.config.poison || state.step == 0;
        for &param in &self.units[unit].params {
            let slot = &self.slots[param];
            let position = self.units[unit].groups.iter().position(|&group| group == slot.group);
            let position = position.expect("a unit's parameter is in one of its groups");
            let item = &self.groups[slot.group].layout.items[slot.item];
            let part = full[position].range(item.start..item.start + item.len);
            let how = if thorough { Thoroughness::All } else { Thoroughness::by_turns(state.entered, param) };
            if let Err(fault) = unit_state.aliases.install(param, &slot.variable, part, how) {
                // The error that counts is this one.
                let _ = self.leave_locked(state, unit);
                return Err(self.storage_error(state, param, fault));
            }
        }
        Ok(guard())
    }

    fn leave(&self, unit: usize) -> Result<()> {
        self.leave_locked(&mut self.state.lock(), unit)
    }

    /// One use of the unit is over; with the last, its tensors give the memory back.
    ///
    /// # Errors
    /// If a program has changed a parameter, or holds its storage; the state remembers it.
    fn leave_locked(&self, state: &mut State, unit: usize) -> Result<()> {
        state.units[unit].users -= 1;
        let taken = if state.units[unit].users == 0 { self.take_back(state, unit) } else { Ok(()) };
        if !state.units[unit].stuck {
            // This runs in drops, which cannot fail: a stream that has failed fails every later wait with the
            // same error.
            let _ = state.gather.release(unit);
        }
        taken
    }

    /// # Errors
    /// If no backward of the whole model can begin, of a loss with a graph (`tracked`) or without.
    pub(crate) fn check_backward(&self, tracked: bool) -> Result<()> {
        let state = self.state.lock();
        state.check_intact()?;
        if state.training != TrainingState::Idle {
            return Err(Error::Usage(format!(
                "the model's backward was called inside its own forward or backward. {CUT_SHORT}"
            )));
        }
        if state.forward_version.is_some_and(|version| version != state.weights_version) {
            return Err(Error::Usage(WEIGHTS_CHANGED.into()));
        }
        if state.pending_forwards == 0 {
            return Err(Error::Usage(format!(
                "a backward of model `{}` needs a training forward before it: call `model.forward(..)`, then \
                 `model.backward(&loss)`",
                self.name
            )));
        }
        if state.reduce.is_synced() {
            let with = if self.config.strategy.shards_grads() {
                format!("{} ranks of `dp_outer`", self.outer_comm.size())
            } else {
                format!("strategy `{}`", self.config.strategy)
            };
            return Err(Error::Usage(format!(
                "with {with} the gradients of a step are reduced once, in its last microbatch or by a call that needs \
                 them reduced (`scale_gradients`, `grad_norm`, `clip_grad_norm`, `visit_gradients`, \
                 `finish_grad_sync`), and no backward can add to them afterwards: run the earlier microbatches under \
                 `model.no_sync()`, make such calls after the last, then step the optimizer"
            )));
        }
        if !tracked {
            return Err(Error::Usage(DETACHED.into()));
        }
        Ok(())
    }

    /// A backward of the whole model begins, which [can](Self::check_backward); the root's sinks are open.
    pub(crate) fn begin_backward(self: &Arc<Self>) -> Result<()> {
        let root_held = {
            let mut state = self.state.lock();
            state.training = TrainingState::Backward;
            state.reached = false;
            *self.failure.lock() = None;
            // A clipping factor is that of the gradients it was computed from.
            state.forget_factors();
            state.gather.backward_order.begin();
            state.root_held
        };
        let begun = if root_held { Ok(()) } else { self.hold_root() };
        let begun = begun.and_then(|()| self.open_gradients(ROOT));
        self.begin_root_parts();
        begun.inspect_err(|_| self.state.lock().training = TrainingState::Idle)
    }

    /// Makes the root whole for a backward: that of an earlier forward has given it up.
    fn hold_root(self: &Arc<Self>) -> Result<()> {
        self.enter(ROOT, Phase::Backward)?.hold();
        self.state.lock().root_held = true;
        Ok(())
    }

    /// The backward of the whole model is over: reduces what is left.
    pub(crate) fn end_backward(&self) -> Result<()> {
        // First: steps in the backward write the root's weights, which no tensor may show meanwhile.
        self.release_root(&mut self.state.lock())?;
        self.close_gradients(ROOT)?;
        let left = self.state.lock().reduce.units_in_use();
        for unit in left {
            self.close_gradients(unit)?;
        }
        self.end_root_parts()?;
        {
            let mut state = self.state.lock();
            let state = &mut *state;
            let moment = Moment { phase: Phase::Backward, step: state.step };
            if state.sync == Sync::Step {
                state.reduce.reduce_remaining(&self.groups, moment)?;
            }
        }
        self.step_reduced_unit()?;
        let mut state = self.state.lock();
        let state = &mut *state;
        state.gather.backward_order.end();
        state.training = TrainingState::Idle;
        state.had_backward = true;
        state.pending_forwards -= 1;
        if state.pending_forwards == 0 {
            state.forward_version = None;
            if self.config.reshard_after_backward {
                state.gather.reshard(ROOT)?;
            }
        }
        Ok(())
    }

    /// The root is sharded again, if a forward has left it whole.
    fn release_root(&self, state: &mut State) -> Result<()> {
        if std::mem::take(&mut state.root_held) { self.leave_locked(state, ROOT) } else { Ok(()) }
    }

    /// The shards have changed: whatever was gathered is given up, and a forward whose backward is still to come is
    /// void.
    pub(crate) fn weights_changed(&self, change: Change) -> Result<(), CommError> {
        let mut state = self.state.lock();
        let state = &mut *state;
        // The state remembers an error.
        let _ = self.release_root(state);
        state.gather.give_up(change)?;
        state.weights_version += 1;
        state.expect_nothing();
        Ok(())
    }

    /// Puts the rank into a state from which a step can begin, whatever was cut short: sinks closed, units
    /// sharded, gradients of the step forgotten.
    pub(crate) fn reset_step(&self) -> Result<(), CommError> {
        for slot in &self.slots {
            slot.sink.close();
        }
        let mut state = self.state.lock();
        let state = &mut *state;
        (state.unit_step, state.lent) = (None, false);
        (state.forward_version, state.pending_forwards) = (None, 0);
        state.unitless.forget();
        // The state remembers an error.
        let _ = self.release_root(state);
        self.take_back_stuck(state);
        state.training = TrainingState::Idle;
        let finished = Self::forget_gradients(state);
        state.forwards = 0;
        state.expect_nothing();
        state.gather.expect_nothing();
        state.gather.reset()?;
        finished
    }

    /// Reduces what the last microbatch has not (ZeRO-0 and 1, where all were run under `no_sync`), and settles.
    pub(crate) fn finish_grad_sync(&self) -> Result<()> {
        {
            let mut state = self.state.lock();
            let moment = Moment { phase: Phase::Optimizer, step: state.step };
            state.reduce.reduce_remaining(&self.groups, moment)?;
        }
        self.settle_intact()?;
        self.divide_by_tokens()
    }

    /// The version of the weights, to be compared at the backward.
    pub(crate) fn weights_version(&self) -> u64 {
        self.state.lock().weights_version
    }

    /// The weights are about to be read or changed where they are: the compute stream waits for all reductions, and
    /// whatever was gathered is given up. The root is sharded again, which a forward leaves whole for its backward, so that
    /// no tensor shows weights that others write; the backward makes it whole again.
    ///
    /// # Errors
    /// [`Error::Usage`] inside a forward or a backward, whose units are in use; if a program holds the storage of a
    /// parameter; those of the streams.
    pub(crate) fn settle(&self) -> Result<()> {
        let mut state = self.state.lock();
        let state = &mut *state;
        if state.training != TrainingState::Idle {
            return Err(Error::Usage(
                "the weights are in use by a forward or a backward of the model: call this after it".into(),
            ));
        }
        // The state remembers an error.
        let _ = self.release_root(state);
        self.take_back_stuck(state);
        if state.units.iter().any(|unit| unit.stuck) {
            state.check_intact()?;
        }
        state.reduce.finish()?;
        Ok(state.gather.reset()?)
    }
}

/// A unit is unsharded while this lives.
pub(crate) struct UnitGuard {
    engine: Arc<Engine>,
    unit: usize,
    held: bool,
}

impl UnitGuard {
    pub(crate) fn unit(&self) -> usize {
        self.unit
    }

    /// Leaves the unit unsharded; the engine's state remembers it.
    fn hold(mut self) {
        self.held = true;
    }

    /// This use of the unit is over.
    ///
    /// # Errors
    /// If a program has changed a parameter of the unit, or holds its storage.
    pub(crate) fn leave(mut self) -> Result<()> {
        self.held = true;
        self.engine.leave(self.unit)
    }
}

impl Drop for UnitGuard {
    fn drop(&mut self) {
        if !self.held {
            // Some error is on its way already, and the state remembers this one.
            let _ = self.engine.leave(self.unit);
        }
    }
}
