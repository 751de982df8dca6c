//! What a program may do to a parameter's tensor, although it must not: the errors, and the way back.
//!
//! A weight that was changed in place stays refused, whatever the strategy, until the weights are loaded. A tensor whose
//! storage is guarded keeps its memory, and its unit is stuck, until the guard is gone.

use super::core::{Engine, State};
use crate::error::{Error, Result};
use crate::memory::Fault;
use crate::spec::ParamSpec;

/// What a program has done to the tensor of a parameter.
pub(super) struct Spoilt {
    /// The weight may be another; else its memory was not given back.
    pub changed: bool,
    error: Error,
}

impl State {
    /// # Errors
    /// If a program has changed a weight, or holds the storage of one.
    pub(crate) fn check_intact(&self) -> Result<()> {
        self.spoilt.as_ref().map_or(Ok(()), |spoilt| Err(spoilt.error.clone()))
    }
}

impl Engine {
    /// [`Engine::settle`], for who uses the weights as they are.
    ///
    /// # Errors
    /// As for [`Engine::settle`], and if a program has changed a weight.
    pub(crate) fn settle_intact(&self) -> Result<()> {
        self.settle()?;
        self.state.lock().check_intact()
    }

    /// All weights were loaded: whatever was changed is overwritten.
    pub(crate) fn forget_changed(&self) {
        let mut state = self.state.lock();
        state.spoilt = state.spoilt.take().filter(|spoilt| !spoilt.changed);
    }

    /// Takes the memory of the unit's parameters out of their tensors. What a tensor still has is not released: the unit is
    /// stuck.
    pub(super) fn take_back(&self, state: &mut State, unit: usize) -> Result<()> {
        let taken = state.units[unit].aliases.take_back();
        state.units[unit].stuck = !state.units[unit].aliases.is_empty();
        let Err(faults) = taken else { return Ok(()) };
        let worst = faults.into_iter().min_by_key(|(_, fault)| *fault == Fault::Guarded);
        let (param, fault) = worst.expect("one at least");
        let error = self.storage_error(state, param, fault);
        let spoilt = Spoilt { changed: fault != Fault::Guarded, error: error.clone() };
        if state.spoilt.as_ref().is_none_or(|before| spoilt.changed && !before.changed) {
            state.spoilt = Some(spoilt);
        }
        Err(error)
    }

    /// Words for what a program has done to the tensor of a parameter.
    pub(super) fn storage_error(&self, state: &State, param: usize, fault: Fault) -> Error {
        let ParamSpec { name, key, .. } = &self.layout.params[param];
        let (rank, unit, step) = (self.comm.rank(), self.unit_name(key.unit), state.step);
        let where_ = format!("of unit `{unit}` (rank {rank}, step {step})");
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
        Error::Param { param: name.clone(), message }
    }

    /// Tries again where a tensor has kept its memory.
    pub(super) fn take_back_stuck(&self, state: &mut State) {
        let stuck: Vec<usize> = (0..state.units.len()).filter(|&unit| state.units[unit].stuck).collect();
        for unit in stuck {
            // The state remembers an error.
            let _ = self.take_back(state, unit);
            if !state.units[unit].stuck {
                let _ = state.gather.release(unit);
            }
        }
        if state.units.iter().all(|unit| !unit.stuck) {
            state.spoilt = state.spoilt.take().filter(|spoilt| spoilt.changed);
        }
    }
}
