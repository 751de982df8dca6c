//! Whose backward is running on a thread. A graph may hold units of a model that has not opened the backward: it would
//! go on without that model's root, and without the end that reduces what is left. So a backward that goes through several
//! models is opened by all of them.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::comm::CommError;
use crate::engine::schedule::ReducedUnit;
use crate::engine::{Ctx, Engine, Step, UnitId};
use crate::error::{Error, Result};

/// What a backward of a loss without a graph is refused with.
pub(crate) const DETACHED: &str = "the loss depends on no trainable parameter: it was detached, computed from values \
     that were read, or came from `evaluate`. Compute it from what `model.forward(..)` has returned; a rank that has \
     nothing to contribute runs the forward on a batch of zeros";

/// Steps the parameters of a unit whose gradients were reduced, while the backward goes on.
pub(crate) trait StepsUnits {
    fn step_unit(&self, ctx: &Ctx, reduced: &ReducedUnit) -> Result<(), CommError>;
}

struct Entry {
    engines: Vec<Arc<Engine>>,
    /// Alive as long as the entry.
    steps: Option<NonNull<dyn StepsUnits>>,
}

thread_local! {
    /// The innermost last.
    static OPENED: RefCell<Vec<Entry>> = const { RefCell::new(Vec::new()) };
}

/// While this lives, the backward that runs on this thread is that of these models, whose units `steps` steps.
pub(crate) struct Opened<'a>(PhantomData<Option<&'a dyn StepsUnits>>);

impl<'a> Opened<'a> {
    pub(crate) fn by(engines: &[&Arc<Engine>], steps: Option<&'a dyn StepsUnits>) -> Opened<'a> {
        let steps = steps.map(|steps| {
            let steps: NonNull<dyn StepsUnits + 'a> = NonNull::from(steps);
            // SAFETY: only the lifetime changes, which `Opened` keeps.
            unsafe { std::mem::transmute::<NonNull<dyn StepsUnits + 'a>, NonNull<dyn StepsUnits>>(steps) }
        });
        let engines = engines.iter().copied().cloned().collect();
        OPENED.with_borrow_mut(|opened| opened.push(Entry { engines, steps }));
        Opened(PhantomData)
    }
}

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        let entry = OPENED.with_borrow_mut(|opened| opened.pop());
        // It may be the last handle of an engine.
        drop(entry);
    }
}

/// Calls `run` with who steps the units of the model whose backward runs on this thread, if that is to be done.
pub(crate) fn with_steps<T>(run: impl FnOnce(Option<&dyn StepsUnits>) -> T) -> T {
    let steps = OPENED.with_borrow(|opened| opened.last().and_then(|entry| entry.steps));
    // SAFETY: the entry is that of an `Opened` in a frame around this one, which keeps the borrow and lives on while `run` does.
    run(steps.map(|steps| unsafe { steps.as_ref() }))
}

impl Engine {
    /// A backward has come to a unit of this model.
    ///
    /// # Errors
    /// If it is not a backward of this model.
    pub(crate) fn check_opened(&self, unit: UnitId) -> candle_core::Result<()> {
        let opened = OPENED.with_borrow(|opened| opened.last().map(|entry| entry.engines.clone()));
        let (own, unit) = (&self.ctx.name, self.ctx.unit_name(unit));
        match opened {
            Some(opened) if opened.iter().any(|opened| opened.id() == self.id()) => Ok(()),
            Some(opened) => Err(opened[0].note_failure(Error::Usage(format!(
                "`backward` of model `{}` was called with a loss of another model: it has come to unit `{unit}` of \
                 `{own}`. Call `backward` of the model that has computed the loss, and `detach` what it takes from \
                 another one; a loss that several models have computed together has its backward by \
                 `model.backward_with(&loss, &[other.joined()])`",
                opened[0].ctx.name
            )))),
            None => Err(Error::Usage(format!(
                "this backward has come to unit `{unit}` of model `{own}`, which has not begun it: write \
                 `model.backward(&loss)` instead of candle's `loss.backward()`, which would leave out the parameters of \
                 the root and reduce nothing"
            ))
            .into()),
        }
    }
}

impl Step {
    /// The backward that is about to end has come to this model.
    ///
    /// # Errors
    /// If it has not: the loss is of something else.
    pub(crate) fn check_reached(&mut self, ctx: &Ctx) -> Result<()> {
        let root = &ctx.unit(UnitId::ROOT).params;
        let touches_root = root.iter().any(|&param| ctx.params[param].sink.is_touched());
        if touches_root || self.backward().is_some_and(|backward| backward.reached) {
            return Ok(());
        }
        Err(Error::Usage(format!(
            "this backward has come to no unit and no parameter of model `{}`: the loss was not computed from what this \
             model's forward has returned, or an op without a backward, or `detach`, cuts the graph between",
            ctx.name
        )))
    }

    /// Refuses an optimizer step for which there are no gradients.
    pub(crate) fn check_has_backward(&self, ctx: &Ctx) -> Result<()> {
        if self.gradients.had_backward {
            return Ok(());
        }
        Err(Error::Usage(format!(
            "no backward of model `{}` has ended since its last optimizer step or reset, so there is nothing to step \
             with: call `model.backward(&loss)` first (candle's `loss.backward()` trains nothing here)",
            ctx.name
        )))
    }
}
