//! Optimizer steps inside the backward, unit by unit, without main gradients that outlive it.

use candle_core::Tensor;

use super::core::Engine;
use super::fsdp::Fsdp;
use super::optimizer::{DueStep, ShardedOptimizer};
use crate::comm::CommError;
use crate::error::{Error, Result};
use crate::optim::{Optimizer, StepInfo};
use crate::pipeline::{ReducedUnit, Sync};
use crate::spec::Strategy;

/// Steps the parameters of a unit whose gradients were reduced.
pub(crate) type UnitStep = Box<dyn FnMut(&Engine, &ReducedUnit) -> Result<(), CommError> + Send>;

/// What needs gradients that are still there after the backward is refused with this.
pub(crate) fn refuse(engine: &Engine, what: &str) -> Result<()> {
    if !engine.config.step_in_backward {
        return Ok(());
    }
    Err(Error::Usage(format!(
        "with `step_in_backward` no gradient outlives the backward of its unit, which rules out {what}: train with \
         `optimizer.backward_and_step(&mut model, &loss)`, or without `step_in_backward`"
    )))
}

/// A configuration must shard gradients to step in the backward.
pub(crate) fn check_strategy(strategy: Strategy) -> Result<()> {
    if strategy.shards_grads() {
        return Ok(());
    }
    Err(Error::Config(format!(
        "`step_in_backward` needs a strategy that shards gradients (`optim-grads` or `optim-grads-params`), not \
         `{strategy}`: others keep whole gradients until the end of the backward"
    )))
}

impl<O: Optimizer + Clone + 'static> ShardedOptimizer<O> {
    /// Runs the backward of `loss` and steps each unit as soon as its gradients are reduced: the update of a unit
    /// follows the backward of the next. The result is that of [`Fsdp::backward`] and [`ShardedOptimizer::step`],
    /// bit for bit.
    ///
    /// It is for models sharded with [`step_in_backward`](super::FsdpConfig::step_in_backward), whose main
    /// gradients live for one unit at a time: 4 bytes for each element of the largest unit's shard instead of the
    /// whole model's. In return gradients cannot be clipped, scaled or looked at, nor accumulated over microbatches,
    /// and no unit may have gradients twice in one backward, as a unit within two recomputed ones would.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// As for [`Fsdp::backward`] and [`ShardedOptimizer::step`], and if the model was sharded without
    /// `step_in_backward` or the microbatch is not the last of its step. After an error of the backward the
    /// weights may be partly changed; if only gradients or backwards are missing (`strict_gradients`) the step is taken.
    pub fn backward_and_step<M>(&mut self, model: &mut Fsdp<M>, loss: &Tensor) -> Result<()> {
        let engine = model.engine().clone();
        if !engine.config.step_in_backward {
            return Err(Error::Usage(
                "`backward_and_step` is for models sharded with `FsdpConfig { step_in_backward: true, .. }`"
                    .into(),
            ));
        }
        if engine.state.lock().sync != Sync::Step {
            return Err(Error::Usage(
                "`backward_and_step` ends a step with every backward: gradients cannot be accumulated over \
                 microbatches"
                    .into(),
            ));
        }
        self.check(&engine)?;
        let first = self.is_new();
        if first {
            self.agree(&engine, |lines| lines)?;
        }
        let at = StepInfo { step: self.steps() + 1, grad_scale: 1.0 };
        let span = engine.begin_span("optimizer", &"optimizer".into());
        let shared = self.share();
        engine.state.lock().unit_step = Some(Box::new(move |engine, reduced| {
            for (group, grads) in &reduced.grads {
                let layout = &engine.groups[*group].layout;
                let at = StepInfo { step: shared.unit_steps(layout.key.unit) + 1, ..at };
                // SAFETY: the unit's reduction is done, in the order of the compute stream, and nobody gathers its weights:
                // all ranks have had its backward, and `lent` keeps this one from beginning another. `shared` is the
                // optimizer that is borrowed mutably for this backward.
                unsafe {
                    shared.update_bucket(engine, at, *group, grads, engine.groups[*group].shard.start)?;
                }
            }
            Ok(())
        }));
        let outcome = model.run_backward(loss);
        engine.state.lock().unit_step = None;
        outcome?;
        self.count_step();
        // The weights have changed: the step ends, whatever is reported of it.
        let missing = if first { engine.report_missing_gradients() } else { Ok(()) };
        let reported = missing.and(engine.report_unitless_forwards());
        let due = DueStep::new(&engine, at, span);
        self.count_units(&due);
        self.note(&due);
        due.finish()?;
        reported
    }
}

impl Engine {
    /// Steps the unit that was reduced last, if there is one and steps are taken in the backward. The compute
    /// stream waits for its reduction: by then every rank has had the unit's backward, so that no one still reads
    /// its weights.
    ///
    /// The rule is the user's code, and runs without the state's lock: what it drops or calls may need it. It cannot
    /// gather weights meanwhile, as they are lent to it.
    pub(crate) fn step_reduced_unit(&self) -> Result<(), CommError> {
        let (mut step, reduced) = {
            let mut state = self.state.lock();
            let state = &mut *state;
            let Some(step) = state.unit_step.take() else { return Ok(()) };
            state.lent = true;
            (step, state.reduce.take_reduced())
        };
        let stepped = reduced.iter().try_for_each(|reduced| {
            self.streams.compute.wait(&reduced.event)?;
            step(self, reduced)
        });
        let mut state = self.state.lock();
        (state.unit_step, state.lent) = (Some(step), false);
        stepped
    }
}
