//! Words for candle's errors that come from a parameter which is resharded. candle names no more than the dtype of what
//! stands in the parameter's tensor; no code of ours runs in its ops. So the words are found where its error becomes one of
//! the runtime's.

use std::cell::RefCell;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::core::{Engine, TrainingState};
use crate::error::Error;
use crate::memory::{TOMBSTONE, names_tombstone};

/// What an error that has the words says in any case.
const SAID: &str = "is the dtype of a parameter that is resharded";

/// How long the engine's state is waited for. A call that converts an error while it holds the state gets no names.
const STATE_WAIT: Duration = Duration::from_millis(200);

/// Parameters that are listed.
const LISTED: usize = 8;

thread_local! {
    /// The models that have run forwards on this thread.
    static HERE: RefCell<Vec<Weak<Engine>>> = const { RefCell::new(Vec::new()) };
}

/// The models that have run forwards on this thread and are still there.
fn models() -> Vec<Arc<Engine>> {
    HERE.with_borrow(|here| here.iter().filter_map(Weak::upgrade).collect())
}

impl From<candle_core::Error> for Error {
    /// An error that comes from a parameter which is resharded becomes [`Error::Resharded`], if a sharded model has run on
    /// this thread.
    fn from(error: candle_core::Error) -> Self {
        let message = error.to_string();
        let error = Arc::new(error);
        if !names_tombstone(&message) || message.contains(SAID) {
            return Error::Tensor(error);
        }
        let models = models();
        if models.is_empty() {
            return Error::Tensor(error);
        }
        let candidates: Vec<String> = models.iter().flat_map(|model| model.resharded()).collect();
        let mut advice = advice(&candidates);
        if models.iter().all(|model| model.is_idle()) {
            advice.push_str(
                ". If it was a backward that failed: candle's own `loss.backward()`, and the `backward_step` of its optimizers, \
                 do not work on a sharded model, before or after the model's own. Write `model.backward(&loss)` once, then \
                 `optimizer.step(&mut model)` with an optimizer of `model.optimizer(..)`",
            );
        }
        Error::Resharded { error, advice }
    }
}

/// What the dtype of tombstones means, whose tensor it may be, and what to do.
fn advice(candidates: &[String]) -> String {
    let listed = candidates[..candidates.len().min(LISTED)].join(", ");
    let more = match candidates.len().saturating_sub(LISTED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let listed = if listed.is_empty() {
        String::new()
    } else {
        format!("Resharded now, and read before, are {listed}{more}. ")
    };
    format!(
        "{TOMBSTONE:?} {SAID}: its values are there from `Param::tensor` to the end of its unit's forward. {listed}Call \
         `Param::tensor(scope)` in each forward instead of keeping its result; what is to outlive the forward can be copied \
         (`tensor.detach().copy()`); outside of forwards there are `visit_weights` and `with_full_params`"
    )
}

impl Engine {
    /// This thread runs a forward of the model.
    pub(super) fn note_thread(self: &Arc<Self>) {
        HERE.with_borrow_mut(|here| {
            if !here.iter().any(|known| std::ptr::eq(known.as_ptr(), Arc::as_ptr(self))) {
                here.retain(|known| known.strong_count() > 0);
                here.push(Arc::downgrade(self));
            }
        });
    }

    /// Words for an error of candle's that names the dtype of tombstones: what it is, and whose tensor it may be.
    pub(super) fn resharded_parameters(&self) -> String {
        advice(&self.resharded())
    }

    /// No forward or backward is under way.
    fn is_idle(&self) -> bool {
        self.state.try_lock_for(STATE_WAIT).is_some_and(|state| state.training == TrainingState::Idle)
    }

    /// Parameters that a forward has read and that are resharded now, with their units.
    fn resharded(&self) -> Vec<String> {
        let Some(state) = self.state.try_lock_for(STATE_WAIT) else { return Vec::new() };
        self.slots
            .iter()
            .zip(&self.layout.params)
            .filter(|(slot, spec)| slot.read.load(Ordering::Relaxed) && state.units[spec.key.unit].users == 0)
            .map(|(_, spec)| format!("`{}` of unit `{}`", spec.name, self.unit_name(spec.key.unit)))
            .collect()
    }
}
