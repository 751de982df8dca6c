//! Gradients of one unit: where they go while a backward runs, and when they are complete.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};

use crate::comm::{CommError, Phase};
use crate::device::{Fill, fill, scale};
use crate::engine::core::{UnitGuard, WEIGHTS_CHANGED};
use crate::engine::optim::tokens;
use crate::engine::unit::opened::{StepsUnits, with_steps};
use crate::engine::unit::root_parts::{self, END};
use crate::engine::unit::weights;
use crate::engine::{Ctx, Engine, Id, Locked, Param, ParamId, Step, UnitId};
use crate::error::Result;

/// Opens the unit's sinks, unless an earlier use of the unit in this backward has.
///
/// # Errors
/// If they were reduced in place already: adding to them would be wrong.
pub(crate) fn open(ctx: &Ctx, step: &mut Step, unit: UnitId) -> Result<()> {
    if step.units[unit].grads.is_reduced() {
        let message = "a recomputation runs it again after its gradients were reduced, as it is called inside \
                       a recomputed unit and outside of it: run this backward under `model.no_sync()`, and \
                       the optimizer's step will reduce once";
        return Err(ctx.unit_error(unit, Phase::Backward, step.number, message));
    }
    step.reduce.open(&mut step.units, unit)?;
    open_sinks(ctx, step, unit);
    Ok(())
}

/// Opens those of the unit's sinks whose bucket has a target, unless they are open.
pub(crate) fn open_sinks(ctx: &Ctx, step: &Step, unit: UnitId) {
    for part in &step.units[unit].grads.parts {
        for &bucket in &part.buckets {
            let Some((target, fresh)) = part.target(bucket) else { continue };
            for item in &ctx.resources.buckets[bucket].layout.items {
                let sink = &ctx.params[ParamId::new(item.param)].sink;
                if !sink.is_open() {
                    sink.open(target.range(item.range()), fresh);
                }
            }
        }
    }
}

/// Moves what candle computed for the unit's parameters, and for `borrowed` ones of enclosing units, into
/// their sinks.
pub(crate) fn collect(
    engine: &Engine,
    unit: UnitId,
    borrowed: &[Param],
    grads: &mut GradStore,
) -> candle_core::Result<()> {
    let ctx = &engine.ctx;
    for &param in &ctx.unit(unit).params {
        if let Some(grad) = grads.remove(ctx.params[param].variable.tensor()) {
            deliver(engine, param, &grad)?;
        }
    }
    for bound in borrowed.iter().filter_map(Param::bound) {
        if let Some(grad) = grads.remove(&bound.variable) {
            deliver(engine, bound.param, &grad)?;
        }
    }
    Ok(())
}

/// Moves a gradient into its sink.
fn deliver(engine: &Engine, param: ParamId, grad: &Tensor) -> candle_core::Result<()> {
    let sink = &engine.ctx.params[param].sink;
    if sink.is_open() {
        return sink.accumulate_tensor(grad);
    }
    root_parts::keep_late(&engine.ctx, &mut engine.step(), param, grad);
    Ok(())
}

/// The unit's gradients of this backward are complete: closes its sinks and reduces. What was reduced before is stepped by
/// `steps`, if the backward is to.
pub(crate) fn close(
    ctx: &Ctx,
    step: &mut Locked<'_>,
    unit: UnitId,
    steps: Option<&dyn StepsUnits>,
) -> Result<(), CommError> {
    let alive = std::mem::take(&mut step.units[unit].grads.alive) || unit == UnitId::ROOT || step.number > 0;
    if unit == UnitId::ROOT {
        root_parts::look(ctx, step, END);
    }
    for &param in &ctx.unit(unit).params {
        close_sink(ctx, step, param, alive)?;
    }
    step_reduced(ctx, step, steps)?;
    let step = &mut **step;
    let (moment, sync) = (step.moment(Phase::Backward), step.sync());
    step.reduce.reduce(&mut step.units, unit, sync, moment)?;
    if unit == UnitId::ROOT { Ok(()) } else { root_parts::reduce_due(ctx, step) }
}

/// Closes a parameter's sink; a unit that is not `alive` has got no gradient that counts.
pub(crate) fn close_sink(ctx: &Ctx, step: &mut Step, param: ParamId, alive: bool) -> Result<(), CommError> {
    let closed = ctx.params[param].sink.close();
    step.gradients.received[param] |= closed.touched && alive;
    match closed.unwritten {
        Some(slice) => fill(ctx.compute(), &slice, Fill::Zero),
        None => Ok(()),
    }
}

/// Steps the unit that was reduced last, if there is one and steps are taken in the backward. The compute
/// stream waits for its reduction: by then every rank has had the unit's backward, so that no one still reads
/// its weights.
///
/// The rule is the user's code, and runs without the lock: what it drops or calls may need it. It cannot
/// gather weights meanwhile, as they are lent to it.
pub(crate) fn step_reduced(
    ctx: &Ctx,
    step: &mut Locked<'_>,
    steps: Option<&dyn StepsUnits>,
) -> Result<(), CommError> {
    let Some(steps) = steps else { return Ok(()) };
    let reduced = std::mem::take(&mut step.reduce.reduced);
    lend(step, true);
    let stepped = Locked::unlocked(step, || {
        reduced.iter().try_for_each(|reduced| {
            ctx.compute().wait(&reduced.event)?;
            steps.step_unit(ctx, reduced)
        })
    });
    lend(step, false);
    stepped
}

/// Whether an update rule has the weights of a unit.
fn lend(step: &mut Step, lent: bool) {
    if let Some(backward) = step.backward() {
        backward.lent = lent;
    }
}

/// Reduces what the microbatches have not.
pub(crate) fn reduce_remaining(step: &mut Step, phase: Phase) -> Result<(), CommError> {
    let moment = step.moment(phase);
    step.reduce.reduce_remaining(&mut step.units, moment)
}

/// Reduces what the last microbatch has not (ZeRO-0 and 1, where all were run under `no_sync`), settles, and divides by the
/// tokens of the step.
pub(crate) fn finish(ctx: &Ctx, step: &mut Locked<'_>) -> Result<()> {
    reduce_remaining(step, Phase::Optimizer)?;
    weights::settle_intact(ctx, step)?;
    tokens::divide(ctx, step)
}

/// Multiplies the reduced gradients.
pub(crate) fn scale_main(ctx: &Ctx, factor: f64) -> Result<(), CommError> {
    for main in ctx.resources.buckets.iter().filter_map(|bucket| bucket.main_grad.as_ref()) {
        scale(ctx.compute(), main.data(), factor as f32)?;
    }
    Ok(())
}

/// Whether a gradient is not all zeros: candle wants zeros where the graph was cut above.
pub(crate) fn is_alive(grad: &Tensor) -> candle_core::Result<bool> {
    if grad.elem_count() == 0 {
        return Ok(false);
    }
    let largest = grad.abs()?.flatten_all()?.max(0)?.to_dtype(DType::F32)?.to_scalar::<f32>()?;
    // A NaN is a gradient too.
    Ok(largest != 0.0)
}

/// The two ends of a unit's passes, each with one lock.
impl Engine {
    /// A training forward of the unit is over, and its backward is to come.
    pub(crate) fn end_unit_forward(self: &Arc<Self>, whole: UnitGuard) -> Result<Expectation> {
        let unit = whole.unit;
        whole.give_up();
        let expectation = {
            let step = &mut *self.step();
            step.units[unit].grads.pending += 1;
            step.units[unit].weights.expected = true;
            let left = weights::leave(&self.ctx, step, unit);
            let at = step.pending.given_up;
            left.map(|()| at).inspect_err(|_| step.units[unit].grads.pending -= 1)
        };
        Ok(Expectation { engine: self.clone(), unit, at: expectation?, met: false })
    }

    /// The backward has come to the unit, whose forward saw this version of the weights. Says whether it is that of the first
    /// step.
    pub(crate) fn begin_unit_backward(
        self: &Arc<Self>,
        unit: UnitId,
        version: u64,
    ) -> Result<(UnitGuard, bool)> {
        let step = &mut *self.step();
        if let Some(backward) = step.backward() {
            backward.reached = true;
        }
        if step.weights_version != version {
            return Err(self.ctx.unit_error(unit, Phase::Backward, step.number, WEIGHTS_CHANGED));
        }
        weights::enter(&self.ctx, step, unit, Phase::Backward)?;
        Ok((UnitGuard::new(self, unit, version), step.number == 0))
    }

    /// The unit's gradients are about to be written; those that come in are `alive` if they are not all zeros.
    pub(crate) fn open_gradients(&self, unit: UnitId, alive: bool) -> Result<()> {
        let step = &mut *self.step();
        step.units[unit].grads.alive |= alive;
        open(&self.ctx, step, unit)
    }

    /// The backward of a unit is over: reduces its gradients if no other is to come, neither of the unit nor of one
    /// `enclosing` it, whose recomputation would run it again.
    pub(crate) fn end_unit_backward(
        &self,
        whole: UnitGuard,
        mut expectation: Expectation,
        enclosing: &[UnitId],
    ) -> Result<()> {
        let (ctx, unit) = (&self.ctx, expectation.unit);
        whole.give_up();
        let step = &mut self.step();
        weights::leave(ctx, step, unit)?;
        expectation.met = true;
        if step.pending.given_up == expectation.at {
            step.units[unit].grads.pending -= 1;
            // An enclosing unit is in its own backward, which is still counted.
            let is_last = step.units[unit].grads.pending == 0
                && enclosing.iter().all(|&unit| step.units[unit].grads.pending <= 1);
            if is_last {
                with_steps(|steps| close(ctx, step, unit, steps))?;
            }
        }
        let step = &mut **step;
        if ctx.config.reshard_after_backward && step.units[unit].grads.pending == 0 {
            step.gather.reshard(&mut step.units, unit)?;
        }
        Ok(())
    }
}

/// A backward that is to come. Dropped without one (the graph was thrown away), it is given up.
pub(crate) struct Expectation {
    engine: Arc<Engine>,
    unit: UnitId,
    /// It is void if pending backwards were given up since.
    at: u64,
    met: bool,
}

impl Drop for Expectation {
    fn drop(&mut self) {
        if self.met {
            return;
        }
        let mut step = self.engine.step();
        if step.pending.given_up == self.at {
            step.units[self.unit].grads.pending -= 1;
        }
    }
}
