//! Whole weights in the parameters' tensors: a unit is entered, which gives its tensors their memory, and left, which takes
//! it back. And what a program may do to those tensors meanwhile, although it must not: the errors, and the way back.
//!
//! A weight that was changed in place stays refused, whatever the strategy, until the weights are loaded. A tensor whose
//! storage is guarded keeps its memory, and its unit is stuck, until the guard is gone.

use crate::comm::{Phase, step_words};
use crate::engine::schedule::{Moment, Pass};
use crate::engine::step::Running;
use crate::engine::{Ctx, Id, ParamId, Step, UnitId};
use crate::error::{Error, Result};
use crate::memory::{Fault, Thoroughness};

/// What a program has done to the tensor of a parameter.
pub(crate) struct Spoilt {
    /// The weight may be another; else its memory was not given back.
    changed: bool,
    error: Error,
}

impl Step {
    /// # Errors
    /// If a program has changed a weight, or holds the storage of one.
    pub(crate) fn check_intact(&self) -> Result<()> {
        self.spoilt.as_ref().map_or(Ok(()), |spoilt| Err(spoilt.error.clone()))
    }

    /// All weights were loaded: whatever was changed is overwritten.
    pub(crate) fn forget_changed(&mut self) {
        self.spoilt = self.spoilt.take().filter(|spoilt| !spoilt.changed);
    }
}

/// A use of the unit begins: its parameters are whole until [`leave`].
///
/// # Errors
/// If a rule has the unit's weights, a program has changed or holds one; those of the gather. There is no use then.
pub(crate) fn enter(ctx: &Ctx, step: &mut Step, unit: UnitId, phase: Phase) -> Result<()> {
    if step.backward().is_some_and(|backward| backward.lent) {
        let message =
            "was entered by the optimizer's rule, which has the weights of a unit: a rule runs no backward";
        let (rank, step, unit) = (ctx.comm.rank(), step.number, ctx.unit_name(unit).to_owned());
        return Err(Error::Unit { rank, unit, phase, step, message: message.into() });
    }
    let pass = match (phase, &step.running) {
        (Phase::Backward, _) => Some(Pass::Backward),
        // A unit inside one that is recomputed.
        (_, Running::Backward(_)) => None,
        _ => Some(Pass::Forward),
    };
    let moment = Moment { phase, step: step.number };
    step.check_intact()?;
    step.gather.acquire(&mut step.units, unit, pass, moment)?;
    let state = &mut step.units[unit];
    if state.weights.uses > 1 {
        return Ok(());
    }
    step.entered += 1;
    let thorough = ctx.config.poison || step.number == 0;
    let entered = step.entered;
    let buckets = ctx.unit(unit).buckets.iter().zip(state.weights.full());
    for (&bucket, full) in buckets {
        for item in &ctx.resources.buckets[bucket].layout.items {
            let param = ParamId::new(item.param);
            let variable = &ctx.params[param].variable;
            let by_turns = || Thoroughness::by_turns(entered, param.index());
            let how = if thorough { Thoroughness::All } else { by_turns() };
            if let Err(fault) = state.aliases.install(param.index(), variable, full.range(item.range()), how)
            {
                // The error that counts is this one.
                let _ = leave(ctx, step, unit);
                return Err(storage_error(ctx, step.number, param, fault));
            }
        }
    }
    Ok(())
}

/// One use of the unit is over; with the last, its tensors give the memory back.
///
/// # Errors
/// If a program has changed a parameter, or holds its storage; the step remembers it.
pub(crate) fn leave(ctx: &Ctx, step: &mut Step, unit: UnitId) -> Result<()> {
    let last = step.units[unit].weights.uses == 1;
    let taken = if last { take_back(ctx, step, unit) } else { Ok(()) };
    if !step.units[unit].stuck {
        // This runs in drops, which cannot fail: a stream that has failed fails every later wait with the
        // same error.
        let _ = step.gather.release(&mut step.units, unit);
    }
    taken
}

/// Makes the root whole for a backward, unless a forward has left it so.
pub(crate) fn hold_root(ctx: &Ctx, step: &mut Step) -> Result<()> {
    if !step.root_held {
        enter(ctx, step, UnitId::ROOT, Phase::Backward)?;
        step.root_held = true;
    }
    Ok(())
}

/// The root is sharded again, if a forward has left it whole.
pub(crate) fn release_root(ctx: &Ctx, step: &mut Step) -> Result<()> {
    if std::mem::take(&mut step.root_held) { leave(ctx, step, UnitId::ROOT) } else { Ok(()) }
}

/// The weights are about to be read or changed where they are: the compute stream waits for all reductions, and
/// whatever was gathered is given up. The root is sharded again, which a forward leaves whole for its backward, so that
/// no tensor shows weights that others write; the backward makes it whole again.
///
/// # Errors
/// [`Error::Usage`] inside a forward or a backward, whose units are in use; if a program holds the storage of a
/// parameter; those of the streams.
pub(crate) fn settle(ctx: &Ctx, step: &mut Step) -> Result<()> {
    if !step.is_idle() {
        return Err(Error::Usage(
            "the weights are in use by a forward or a backward of the model: call this after it".into(),
        ));
    }
    // The step remembers an error.
    let _ = release_root(ctx, step);
    take_back_stuck(ctx, step);
    if step.units.iter().any(|unit| unit.stuck) {
        step.check_intact()?;
    }
    step.reduce.finish()?;
    Ok(step.gather.reset(&mut step.units)?)
}

/// [`settle`], for who uses the weights as they are.
///
/// # Errors
/// As for [`settle`], and if a program has changed a weight.
pub(crate) fn settle_intact(ctx: &Ctx, step: &mut Step) -> Result<()> {
    settle(ctx, step)?;
    step.check_intact()
}

/// Takes the memory of the unit's parameters out of their tensors. What a tensor still has is not released: the unit is
/// stuck.
fn take_back(ctx: &Ctx, step: &mut Step, unit: UnitId) -> Result<()> {
    let state = &mut step.units[unit];
    let taken = state.aliases.take_back();
    state.stuck = !state.aliases.is_empty();
    let Err(faults) = taken else { return Ok(()) };
    let worst = faults.into_iter().min_by_key(|(_, fault)| *fault == Fault::Guarded);
    let (param, fault) = worst.expect("one at least");
    let error = storage_error(ctx, step.number, ParamId::new(param), fault);
    let spoilt = Spoilt { changed: fault != Fault::Guarded, error: error.clone() };
    if step.spoilt.as_ref().is_none_or(|before| spoilt.changed && !before.changed) {
        step.spoilt = Some(spoilt);
    }
    Err(error)
}

/// Tries again where a tensor has kept its memory.
pub(crate) fn take_back_stuck(ctx: &Ctx, step: &mut Step) {
    for unit in step.units.ids() {
        if !step.units[unit].stuck {
            continue;
        }
        // The step remembers an error.
        let _ = take_back(ctx, step, unit);
        if !step.units[unit].stuck {
            let _ = step.gather.release(&mut step.units, unit);
        }
    }
    if step.units.iter().all(|unit| !unit.stuck) {
        step.spoilt = step.spoilt.take().filter(|spoilt| spoilt.changed);
    }
}

/// Words for what a program has done to the tensor of a parameter.
fn storage_error(ctx: &Ctx, step: u64, param: ParamId, fault: Fault) -> Error {
    let (rank, unit) = (ctx.comm.rank(), ctx.unit_name(ctx.unit_of(param)));
    let where_ = format!("of unit `{unit}` (rank {rank}, {})", step_words(step));
    let message = match fault {
        Fault::Guarded => format!(
            "{where_} cannot be unsharded or resharded: a guard of its tensor's `storage_and_layout` is still alive. \
             Drop it before the unit's forward ends; then `reset_step` makes the model usable again"
        ),
        Fault::Written | Fault::Replaced => format!(
            "{where_} was changed in place{}. Weights are changed by an optimizer, `load_weights`, `with_full_params` or \
             a restore, never through their tensors: compute with a copy (`tensor.copy()`). The model's weights can no \
             longer be relied on: load them to go on",
            if fault == Fault::Replaced { ", and its memory taken or resized" } else { "" },
        ),
    };
    Error::Param { param: ctx.spec(param).name.clone(), message }
}
