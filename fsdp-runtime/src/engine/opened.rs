//! Whose backward is running on a thread. A graph may hold units of a model that has not opened the backward: it would
//! go on without that model's root, and without the end that reduces what is left. So a backward that goes through several
//! models is opened by all of them.

use std::cell::RefCell;
use std::sync::Arc;

use super::core::{Engine, ROOT};
use crate::error::{Error, Result};

/// What a backward of a loss without a graph is refused with.
pub(crate) const DETACHED: &str = "the loss depends on no trainable parameter: it was detached, computed from values \
     that were read, or came from `evaluate`. Compute it from what `model.forward(..)` has returned; a rank that has \
     nothing to contribute runs the forward on a batch of zeros";

thread_local! {
    /// The innermost last.
    static OPENED: RefCell<Vec<Vec<Arc<Engine>>>> = const { RefCell::new(Vec::new()) };
}

/// While this lives, the backward that runs on this thread is that of these models.
pub(crate) struct Opened;

impl Opened {
    pub(crate) fn by(engines: &[&Arc<Engine>]) -> Opened {
        OPENED.with_borrow_mut(|opened| opened.push(engines.iter().copied().cloned().collect()));
        Opened
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        OPENED.with_borrow_mut(|opened| opened.pop());
    }
}

impl Engine {
    /// A backward has come to a unit of this model.
    ///
    /// # Errors
    /// If it is not a backward of this model.
    pub(crate) fn note_reached(&self, unit: usize) -> candle_core::Result<()> {
        let opened = OPENED.with_borrow(|opened| opened.last().cloned());
        let (own, unit) = (&self.name, self.unit_name(unit));
        match opened {
            Some(opened) if opened.iter().any(|opened| opened.id() == self.id()) => {
                self.state.lock().reached = true;
                Ok(())
            }
            Some(opened) => Err(opened[0].note_failure(Error::Usage(format!(
                "`backward` of model `{}` was called with a loss of another model: it has come to unit `{unit}` of \
                 `{own}`. Call `backward` of the model that has computed the loss, and `detach` what it takes from \
                 another one; a loss that several models have computed together has its backward by \
                 `model.backward_with(&loss, &[other.joined()])`",
                opened[0].name
            )))),
            None => Err(Error::Usage(format!(
                "this backward has come to unit `{unit}` of model `{own}`, which has not begun it: write \
                 `model.backward(&loss)` instead of candle's `loss.backward()`, which would leave out the parameters of \
                 the root and reduce nothing"
            ))
            .into()),
        }
    }

    /// The backward that is about to end has come to this model.
    ///
    /// # Errors
    /// If it has not: the loss is of something else.
    pub(crate) fn check_reached(&self) -> Result<()> {
        let touches_root = self.units[ROOT].params.iter().any(|&param| self.slots[param].sink.is_touched());
        if touches_root || self.state.lock().reached {
            return Ok(());
        }
        Err(Error::Usage(format!(
            "this backward has come to no unit and no parameter of model `{}`: the loss was not computed from what this \
             model's forward has returned, or an op without a backward, or `detach`, cuts the graph between",
            self.name
        )))
    }

    /// Refuses an optimizer step for which there are no gradients.
    pub(crate) fn check_has_backward(&self) -> Result<()> {
        if self.state.lock().had_backward {
            return Ok(());
        }
        Err(Error::Usage(format!(
            "no backward of model `{}` has ended since its last optimizer step or reset, so there is nothing to step \
             with: call `model.backward(&loss)` first (candle's `loss.backward()` trains nothing here)",
            self.name
        )))
    }
}
