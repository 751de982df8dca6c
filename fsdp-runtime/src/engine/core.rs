//! The engine of one rank: what never changes, and the step that is being taken behind a lock. What is here are the calls
//! that lock it: the passes of the whole model, and the guard of a unit that is in use.

use std::sync::Arc;
use std::time::Duration;

use candle_core::Tensor;
use parking_lot::Mutex;

use crate::comm::{CommError, Phase};
use crate::engine::schedule::{AllGatherPipeline, GradReducePipeline, Sync, Units};
use crate::engine::step::{Backward, Factors, Running};
use crate::engine::unit::opened::{DETACHED, StepsUnits};
use crate::engine::unit::{gradients, resharded, root_parts, weights};
use crate::engine::{Ctx, Locked, Step, UnitId};
use crate::error::{Error, Result};
use crate::memory::names_tombstone;
use crate::random::RandomKey;

/// Why a backward is refused after an optimizer step or a load.
pub(crate) const WEIGHTS_CHANGED: &str = "the weights have changed since the forward of this loss (by an optimizer \
     step or `load_weights`): its gradients would mix old activations with new weights; run the forward again";

/// Everything a rank knows of its sharded model, but the user's module.
pub(crate) struct Engine {
    pub ctx: Ctx,
    step: Mutex<Step>,
}

impl Step {
    /// # Errors
    /// If the model's `pass` cannot begin: another is under way, or a program has changed a weight.
    fn check_idle(&self, pass: &str) -> Result<()> {
        self.check_intact()?;
        if self.is_idle() {
            return Ok(());
        }
        Err(Error::Usage(format!(
            "the model's {pass} was called inside its own forward or backward. If that was cut short, as by a panic that was \
             caught, call `model.reset_step()`, and it can be called again"
        )))
    }
}

impl Engine {
    pub(crate) fn new(
        ctx: Ctx,
        units: Units,
        gather: AllGatherPipeline,
        reduce: GradReducePipeline,
    ) -> Arc<Engine> {
        let step = Step::new(&ctx, units, gather, reduce);
        step.note(&ctx);
        Arc::new(Engine { ctx, step: Mutex::new(step) })
    }

    pub(crate) fn id(&self) -> usize {
        self.ctx.id
    }

    /// The step, for one public call or one end of a unit.
    pub(crate) fn step(&self) -> Locked<'_> {
        self.step.lock()
    }

    /// The step, unless it is locked for longer than `wait`.
    pub(crate) fn step_within(&self, wait: Duration) -> Option<Locked<'_>> {
        self.step.try_lock_for(wait)
    }

    /// An error inside `unit`, with where and when.
    pub(crate) fn unit_error(&self, unit: UnitId, phase: Phase, message: impl Into<String>) -> Error {
        self.ctx.unit_error(unit, phase, self.step().number, message)
    }

    /// Keeps the first error that has to travel through the tensor library, whose own error type holds only
    /// text.
    pub(crate) fn note_failure(&self, error: Error) -> candle_core::Error {
        self.step().failure.get_or_insert_with(|| error.clone());
        error.into()
    }

    /// An error that came out of a module's code: says which unit, unless one inside has said so already. `phase` is the
    /// pass that is under way if it is not said.
    pub(crate) fn note_unit_failure(
        &self,
        unit: UnitId,
        phase: Option<Phase>,
        error: candle_core::Error,
    ) -> candle_core::Error {
        let mut step = self.step();
        if step.failure.is_some() {
            return error;
        }
        let mut message = error.to_string();
        if names_tombstone(&message) {
            message = format!("{message}. {}", resharded::parameters(&self.ctx, &step));
        }
        let phase = phase.unwrap_or(step.phase());
        let error = self.ctx.unit_error(unit, phase, step.number, message);
        step.failure = Some(error.clone());
        error.into()
    }

    /// The error that was kept, if there is one.
    pub(crate) fn noted_failure(&self) -> Option<Error> {
        self.step().failure.take()
    }

    /// The typed error behind one that came out of the tensor library.
    pub(crate) fn explain(&self, error: candle_core::Error) -> Error {
        self.noted_failure().unwrap_or_else(|| error.into())
    }

    /// A forward of the whole model begins; its random numbers depend on the key.
    pub(crate) fn begin_forward(self: &Arc<Self>) -> Result<(UnitGuard, RandomKey)> {
        resharded::note_thread(self);
        let (ctx, step) = (&self.ctx, &mut *self.step());
        step.check_idle("forward")?;
        step.running = Running::Forward;
        step.failure = None;
        step.gather.forward_order.begin();
        step.unitless.begin();
        weights::enter(ctx, step, UnitId::ROOT, Phase::Forward)
            .inspect_err(|_| step.running = Running::Nothing)?;
        let random = step.random(ctx);
        Ok((UnitGuard::new(self, UnitId::ROOT, step.weights_version), random))
    }

    /// The forward is over. After training the root stays unsharded for the backward; after evaluation
    /// nothing does.
    pub(crate) fn end_forward(&self, root: UnitGuard, training: bool, complete: bool) -> Result<()> {
        root.give_up();
        let (ctx, step) = (&self.ctx, &mut *self.step());
        step.running = Running::Nothing;
        let unitless = step.gather.forward_order.is_at_start();
        if complete {
            step.gather.forward_order.end();
        }
        if training && complete {
            step.count_forward(unitless);
            if !step.root_held {
                step.root_held = true;
                return Ok(());
            }
        }
        weights::leave(ctx, step, UnitId::ROOT)?;
        if !training {
            step.gather.reset(&mut step.units)?;
        }
        Ok(())
    }

    /// Makes the unit's parameters whole until the guard is dropped.
    pub(crate) fn enter(self: &Arc<Self>, unit: UnitId, phase: Phase) -> Result<UnitGuard> {
        let step = &mut *self.step();
        weights::enter(&self.ctx, step, unit, phase)?;
        Ok(UnitGuard::new(self, unit, step.weights_version))
    }

    /// # Errors
    /// If no backward of the whole model can begin, of a loss with a graph or without.
    pub(crate) fn check_backward(&self, loss: &Tensor) -> Result<()> {
        let (ctx, step) = (&self.ctx, self.step());
        step.check_idle("backward")?;
        if step.pending.version.is_some_and(|version| version != step.weights_version) {
            return Err(Error::Usage(WEIGHTS_CHANGED.into()));
        }
        if step.pending.forwards == 0 {
            return Err(Error::Usage(format!(
                "a backward of model `{}` needs a training forward before it: call `model.forward(..)`, then \
                 `model.backward(&loss)`",
                ctx.name
            )));
        }
        if step.units.iter().any(|unit| unit.grads.is_reduced()) {
            let with = if ctx.config.strategy.shards_grads() {
                format!("{} ranks of `dp_outer`", ctx.outer_comm.size())
            } else {
                format!("strategy `{}`", ctx.config.strategy)
            };
            return Err(Error::Usage(format!(
                "with {with} the gradients of a step are reduced once, in its last microbatch or by a call that needs \
                 them reduced (`scale_gradients`, `grad_norm`, `clip_grad_norm`, `visit_gradients`, \
                 `finish_grad_sync`), and no backward can add to them afterwards: run the earlier microbatches under \
                 `model.no_sync()`, make such calls after the last, then step the optimizer"
            )));
        }
        if !loss.track_op() {
            return Err(Error::Usage(DETACHED.into()));
        }
        Ok(())
    }

    /// A backward of the whole model begins, which [can](Self::check_backward); the root's sinks are open.
    pub(crate) fn begin_backward(&self, loss: &Tensor) -> Result<()> {
        let (ctx, step) = (&self.ctx, &mut *self.step());
        let root = step.root_order.begin();
        step.running = Running::Backward(Backward { reached: false, lent: false, root });
        step.failure = None;
        // A clipping factor is that of the gradients it was computed from.
        step.gradients.factors = Factors::NONE;
        step.gather.backward_order.begin();
        let begun = weights::hold_root(ctx, step).and_then(|()| gradients::open(ctx, step, UnitId::ROOT));
        begun.inspect_err(|_| step.running = Running::Nothing)?;
        step.gradients.losses.push(loss.detach());
        Ok(())
    }

    /// The backward of the whole model is over: reduces what is left, which `steps` steps if the backward is to.
    pub(crate) fn end_backward(&self, steps: Option<&dyn StepsUnits>) -> Result<()> {
        let ctx = &self.ctx;
        let step = &mut self.step();
        // First: steps in the backward write the root's weights, which no tensor may show meanwhile.
        weights::release_root(ctx, step)?;
        gradients::close(ctx, step, UnitId::ROOT, steps)?;
        let open = |unit: &UnitId| step.units[*unit].grads.is_open();
        let left: Vec<UnitId> = step.units.ids().filter(open).collect();
        for unit in left {
            gradients::close(ctx, step, unit, steps)?;
        }
        root_parts::end(ctx, step)?;
        if step.sync() == Sync::Step {
            gradients::reduce_remaining(step, Phase::Backward)?;
        }
        gradients::step_reduced(ctx, step, steps)?;
        step.gather.backward_order.end();
        step.running = Running::Nothing;
        step.count_backward();
        if step.pending.forwards == 0 && ctx.config.reshard_after_backward {
            let step = &mut **step;
            step.gather.reshard(&mut step.units, UnitId::ROOT)?;
        }
        Ok(())
    }

    /// Puts the rank into a state from which a step can begin, whatever was cut short: sinks closed, units
    /// sharded, gradients of the step forgotten.
    pub(crate) fn reset_step(&self) -> Result<(), CommError> {
        self.step().abort(&self.ctx)
    }

    pub(crate) fn settle(&self) -> Result<()> {
        weights::settle(&self.ctx, &mut self.step())
    }

    pub(crate) fn settle_intact(&self) -> Result<()> {
        weights::settle_intact(&self.ctx, &mut self.step())
    }

    pub(crate) fn note_event(&self, event: String) {
        self.step().note_event(&self.ctx, event);
    }
}

/// A unit is unsharded while this lives.
pub(crate) struct UnitGuard {
    engine: Arc<Engine>,
    pub unit: UnitId,
    /// The version of the weights, to be compared at the backward.
    pub weights_version: u64,
    left: bool,
}

impl UnitGuard {
    pub(super) fn new(engine: &Arc<Engine>, unit: UnitId, weights_version: u64) -> Self {
        UnitGuard { engine: engine.clone(), unit, weights_version, left: false }
    }

    /// Leaves the unit unsharded: whoever has called this leaves it.
    pub(crate) fn give_up(mut self) {
        self.left = true;
    }

    /// This use of the unit is over.
    ///
    /// # Errors
    /// If a program has changed a parameter of the unit, or holds its storage.
    pub(crate) fn leave(mut self) -> Result<()> {
        self.left = true;
        weights::leave(&self.engine.ctx, &mut self.engine.step(), self.unit)
    }
}

impl Drop for UnitGuard {
    fn drop(&mut self) {
        if !self.left {
            // Some error is on its way already, and the step remembers this one.
            let _ = weights::leave(&self.engine.ctx, &mut self.engine.step(), self.unit);
        }
    }
}
