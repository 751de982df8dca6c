//! Optimizer steps inside the backward, unit by unit, without main gradients that outlive it.

use candle_core::Tensor;

use crate::buffer::BucketBuffers;
use crate::comm::CommError;
use crate::engine::api::{joined, unitless};
use crate::engine::io::whole;
use crate::engine::schedule::{ReducedUnit, Sync};
use crate::engine::unit::opened::StepsUnits;
use crate::engine::{Ctx, Fsdp, ShardedOptimizer, UnitId};
use crate::error::{Error, Result};
use crate::optim::{Optimizer, StepInfo};
use crate::spec::Strategy;

/// What needs gradients that are still there after the backward is refused with this.
pub(crate) fn refuse(ctx: &Ctx, what: &str) -> Result<()> {
    if !ctx.config.step_in_backward {
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

impl<O: Optimizer> ShardedOptimizer<O> {
    /// Runs the backward of `loss` and steps each unit as soon as its gradients are reduced: the update of a unit
    /// follows the backward of the next. The result is that of [`Fsdp::backward`] and [`ShardedOptimizer::step`],
    /// bit for bit.
    ///
    /// It is for models sharded with [`step_in_backward`](crate::engine::FsdpConfig::step_in_backward), whose main
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
        let ctx = &engine.ctx;
        if !ctx.config.step_in_backward {
            return Err(Error::Usage(
                "`backward_and_step` is for models sharded with `FsdpConfig { step_in_backward: true, .. }`"
                    .into(),
            ));
        }
        let first = !self.begun;
        {
            let step = &mut engine.step();
            if step.sync() != Sync::Step {
                return Err(Error::Usage(
                    "`backward_and_step` ends a step with every backward: gradients cannot be accumulated over \
                     microbatches"
                        .into(),
                ));
            }
            self.check(ctx)?;
            if first {
                self.agree(ctx, step, Vec::new())?;
            }
        }
        let at = StepInfo { step: self.steps() + 1, grad_scale: 1.0 };
        let span = ctx.begin_span("optimizer", &"optimizer".into());
        joined::run_backward(&[&engine], loss, Some(&UnitByUnit { optimizer: self, at }))?;
        let step = &mut engine.step();
        // The weights have changed: the step ends, whatever is reported of it.
        let missing = if first { whole::report_missing_gradients(ctx, step) } else { Ok(()) };
        let reported = missing.and(unitless::report(ctx, step));
        let with_gradient = step.with_gradient();
        self.due(ctx, step, at.grad_scale, with_gradient, span).finish(ctx, step)?;
        reported
    }
}

/// An optimizer, borrowed for a backward whose units it steps.
struct UnitByUnit<'a, O> {
    optimizer: &'a ShardedOptimizer<O>,
    at: StepInfo,
}

impl<O: Optimizer> StepsUnits for UnitByUnit<'_, O> {
    fn step_unit(&self, ctx: &Ctx, reduced: &ReducedUnit) -> Result<(), CommError> {
        for (bucket, grads) in &reduced.grads {
            let BucketBuffers { layout, shard, .. } = &ctx.resources.buckets[*bucket];
            let unit = UnitId::of(layout);
            let at = StepInfo { step: self.optimizer.counts.unit_steps[unit] + 1, ..self.at };
            // SAFETY: the unit's reduction is done, in the order of the compute stream, and nobody gathers its weights:
            // all ranks have had its backward, and `lent` keeps this one from beginning another. The optimizer is borrowed
            // mutably for this backward, and by this alone.
            unsafe { self.optimizer.update_bucket(ctx, at, *bucket, grads, shard.start)? };
        }
        Ok(())
    }
}
