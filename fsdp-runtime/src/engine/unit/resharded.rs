//! Words for candle's errors that come from a parameter which is resharded. candle names no more than the dtype of what
//! stands in the parameter's tensor; no code of ours runs in its ops. So the words are found where its error becomes one of
//! the runtime's.

use std::cell::RefCell;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::engine::{Ctx, Engine, ParamId, Step, UnitId};
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
        let (mut candidates, mut all_idle) = (Vec::new(), true);
        for model in &models {
            let step = model.step_within(STATE_WAIT);
            candidates.extend(step.iter().flat_map(|step| resharded(&model.ctx, step)));
            all_idle &= step.is_some_and(|step| step.is_idle());
        }
        let mut advice = advice(&candidates);
        if all_idle {
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

/// This thread runs a forward of the model.
pub(crate) fn note_thread(engine: &Arc<Engine>) {
    HERE.with_borrow_mut(|here| {
        if !here.iter().any(|known| std::ptr::eq(known.as_ptr(), Arc::as_ptr(engine))) {
            here.retain(|known| known.strong_count() > 0);
            here.push(Arc::downgrade(engine));
        }
    });
}

/// Words for an error of candle's that names the dtype of tombstones: what it is, and whose tensor it may be.
pub(crate) fn parameters(ctx: &Ctx, step: &Step) -> String {
    advice(&resharded(ctx, step))
}

/// Parameters that a forward has read and that are resharded now, with their units.
fn resharded(ctx: &Ctx, step: &Step) -> Vec<String> {
    let is_resharded = |unit: UnitId| step.units[unit].weights.uses == 0 || step.units[unit].stuck;
    let found = ctx
        .params
        .entries()
        .filter(|(param, place)| place.read.load(Ordering::Relaxed) && is_resharded(ctx.unit_of(*param)));
    let name = |param: ParamId| {
        format!("`{}` of unit `{}`", ctx.spec(param).name, ctx.unit_name(ctx.unit_of(param)))
    };
    found.map(|(param, _)| name(param)).collect()
}
