//! Gradients of one unit: where they go while a backward runs, and when they are complete.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};

use super::core::{Engine, ROOT, State, UnitGuard};
use super::param::Param;
use super::root_parts::END;
use crate::comm::{CommError, Phase};
use crate::device::{Fill, fill};
use crate::error::Result;
use crate::pipeline::{GradTarget, Moment};

impl Engine {
    /// A forward of the unit that `whole` keeps unsharded has happened, and its backward is to come.
    pub(crate) fn expect_backward(self: &Arc<Self>, whole: &UnitGuard) -> Expectation {
        let unit = whole.unit();
        let mut state = self.state.lock();
        state.units[unit].pending += 1;
        state.gather.expect_backward(unit);
        let at = state.expectations;
        drop(state);
        Expectation { engine: self.clone(), unit, at, met: false }
    }

    /// Opens the unit's sinks, unless an earlier use of the unit in this backward has.
    ///
    /// # Errors
    /// If they were reduced in place already: adding to them would be wrong.
    pub(crate) fn open_gradients(&self, unit: usize) -> Result<()> {
        let targets = {
            let mut state = self.state.lock();
            if state.reduce.is_reduced(unit) {
                let message = "a recomputation runs it again after its gradients were reduced, as it is called inside \
                               a recomputed unit and outside of it: run this backward under `model.no_sync()`, and \
                               the optimizer's step will reduce once";
                drop(state);
                return Err(self.unit_error(unit, Phase::Backward, message));
            }
            let state = &mut *state;
            state.reduce.open(&self.groups, unit, |other| state.gather.is_in_use(other))?
        };
        self.open_sinks(unit, &targets);
        Ok(())
    }

    /// Opens those of the unit's sinks that `targets` are for, unless they are.
    pub(crate) fn open_sinks(&self, unit: usize, targets: &[GradTarget]) {
        for &param in &self.units[unit].params {
            let slot = &self.slots[param];
            if let Some(target) = targets.iter().find(|target| target.group == slot.group)
                && !slot.sink.is_open()
            {
                let item = &self.groups[slot.group].layout.items[slot.item];
                slot.sink.open(target.bucket.range(item.start..item.start + item.len), !target.fresh);
            }
        }
    }

    /// Moves what candle computed for the unit's parameters, and for `borrowed` ones of enclosing units, into
    /// their sinks.
    pub(crate) fn collect_gradients(
        &self,
        unit: usize,
        borrowed: &[Param],
        grads: &mut GradStore,
    ) -> candle_core::Result<()> {
        for &param in &self.units[unit].params {
            if let Some(grad) = grads.remove(self.slots[param].variable.tensor()) {
                self.deliver(param, &grad)?;
            }
        }
        for bound in borrowed.iter().filter_map(Param::bound) {
            if let Some(grad) = grads.remove(&bound.variable) {
                self.deliver(bound.slot, &grad)?;
            }
        }
        Ok(())
    }

    /// Moves a gradient into its sink.
    fn deliver(&self, param: usize, grad: &Tensor) -> candle_core::Result<()> {
        let sink = &self.slots[param].sink;
        if sink.is_open() {
            return sink.accumulate_tensor(grad);
        }
        self.keep_late(param, grad);
        Ok(())
    }

    /// Gives the unit's whole weights up, unless another backward of it is to come.
    pub(crate) fn reshard_after_backward(&self, unit: usize) -> Result<(), CommError> {
        let mut state = self.state.lock();
        if state.units[unit].pending == 0 {
            state.gather.reshard(unit)?;
        }
        Ok(())
    }

    /// The unit's gradients of this backward are complete: closes its sinks and reduces.
    pub(crate) fn close_gradients(&self, unit: usize) -> Result<(), CommError> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let alive = std::mem::take(&mut state.units[unit].alive) || unit == ROOT || state.step > 0;
        if unit == ROOT && self.follows_root(state) {
            self.look_at_root(state, END);
        }
        for &param in &self.units[unit].params {
            self.close_sink(state, param, alive)?;
        }
        drop(guard);
        self.step_reduced_unit()?;
        let mut state = self.state.lock();
        let state = &mut *state;
        let moment = Moment { phase: Phase::Backward, step: state.step };
        state.reduce.reduce(&self.groups, unit, state.sync, moment)?;
        if unit == ROOT { Ok(()) } else { self.reduce_root_parts(state, moment) }
    }

    /// Closes a parameter's sink; a unit that is not `alive` has got no gradient that counts.
    pub(crate) fn close_sink(&self, state: &mut State, param: usize, alive: bool) -> Result<(), CommError> {
        let closed = self.slots[param].sink.close();
        state.received[param] |= closed.touched && alive;
        match closed.unwritten {
            Some(slice) => fill(&*self.streams.compute, &slice, Fill::Zero),
            None => Ok(()),
        }
    }

    /// In the first step, notes whether a gradient reaches `unit` at all: candle wants zeros where the graph was
    /// cut above.
    pub(crate) fn note_incoming(&self, unit: usize, grad: &Tensor) -> candle_core::Result<()> {
        if self.state.lock().step > 0 || grad.elem_count() == 0 {
            return Ok(());
        }
        let largest = grad.abs()?.flatten_all()?.max(0)?.to_dtype(DType::F32)?.to_scalar::<f32>()?;
        // A NaN is a gradient too.
        self.state.lock().units[unit].alive |= largest != 0.0;
        Ok(())
    }
}

/// A backward that is to come. Dropped without one (the graph was thrown away), it is given up.
pub(crate) struct Expectation {
    engine: Arc<Engine>,
    unit: usize,
    /// It is void if pending backwards were given up since.
    at: u64,
    met: bool,
}

impl Expectation {
    /// The backward has happened: reduces the unit's gradients if no other is to come, neither of the unit nor of one
    /// `enclosing` it, whose recomputation would run it again.
    pub(crate) fn meet(mut self, enclosing: &[usize]) -> Result<(), CommError> {
        self.met = true;
        let last = {
            let mut state = self.engine.state.lock();
            if state.expectations != self.at {
                return Ok(());
            }
            state.units[self.unit].pending -= 1;
            // An enclosing unit is in its own backward, which is still counted.
            state.units[self.unit].pending == 0
                && enclosing.iter().all(|&unit| state.units[unit].pending <= 1)
        };
        if last { self.engine.close_gradients(self.unit) } else { Ok(()) }
    }
}

impl Drop for Expectation {
    fn drop(&mut self) {
        let mut state = self.engine.state.lock();
        if !self.met && state.expectations == self.at {
            state.units[self.unit].pending -= 1;
        }
    }
}
