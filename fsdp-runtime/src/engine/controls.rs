//! What a training loop does between its passes: forget gradients, scale them, set what they are divided by, give up whole
//! weights, and say when they are given up.

use super::backward_step;
use super::config::GradientScaling;
use super::core::{Engine, ROOT, State, TrainingState};
use super::fsdp::Fsdp;
use super::tokens::TokenCount;
use crate::comm::{CommError, step_words};
use crate::device::scale;
use crate::error::{Error, Result};
use crate::spec::ReshardAfterForward;

impl<M> Fsdp<M> {
    /// Forgets the gradients of this step. Forwards whose backward is still to come stay good, unlike after
    /// [`Fsdp::reset_step`]. The optimizer's step does it by itself.
    ///
    /// # Errors
    /// Inside a forward or a backward, and those of reductions that are under way.
    pub fn zero_grad(&self) -> Result<()> {
        let engine = self.engine();
        {
            let mut state = engine.state.lock();
            if state.training != TrainingState::Idle {
                return Err(Error::Usage(
                    "gradients are zeroed between the passes, not inside a forward or a backward; `reset_step` ends one \
                     that was cut short"
                        .into(),
                ));
            }
            Engine::forget_gradients(&mut state)?;
        }
        engine.note_event(format!("after its gradients were zeroed in {}", step_words(self.step_count())));
        Ok(())
    }

    /// Multiplies the gradients of this step so far by `factor`, after they are reduced; later microbatches are not
    /// scaled. A norm is that of the scaled gradients, and a factor that clipping has found stays.
    ///
    /// # Errors
    /// If `factor` is not finite, gradients are stepped in the backward
    /// ([`FsdpConfig::step_in_backward`](super::FsdpConfig::step_in_backward)), and those of the reductions.
    pub fn scale_gradients(&self, factor: f64) -> Result<()> {
        let engine = self.engine();
        if !factor.is_finite() {
            return Err(Error::Config(format!("gradients are scaled by a finite factor, not by {factor}")));
        }
        backward_step::refuse(engine, "scaling gradients")?;
        engine.finish_grad_sync()?;
        engine.scale_main_grads(factor)?;
        {
            // What was not finite is not made so.
            let mut state = engine.state.lock();
            state.grad_norm = state.grad_norm.filter(|norm| !norm.is_finite());
        }
        let step = step_words(self.step_count());
        engine.note_event(format!("after its gradients were scaled by {factor} in {step}"));
        Ok(())
    }

    /// Has the sum over the ranks of a gradient divided by `factor`, from the next backward on: instead of the number of
    /// ranks ([`GradientScaling::Mean`]) or of 1 ([`GradientScaling::Sum`]), to which `None` goes back.
    ///
    /// # Errors
    /// If `factor` is not positive and finite, gradients are divided by tokens ([`GradientScaling::PerToken`]), or this step
    /// has gradients already.
    pub fn set_gradient_divide_factor(&self, factor: Option<f64>) -> Result<()> {
        let engine = self.engine();
        if let Some(factor) = factor
            && !(factor > 0.0 && ((1.0 / factor) as f32).is_normal())
        {
            return Err(Error::Config(format!(
                "gradients are divided by a positive and finite factor, not by {factor}"
            )));
        }
        if engine.config.scaling == GradientScaling::PerToken {
            return Err(Error::Config(
                "gradients are divided by the number of tokens (`GradientScaling::PerToken`), not by a factor".into(),
            ));
        }
        let own = engine.config.scaling.factor(engine.comm.size());
        {
            let mut state = engine.state.lock();
            if state.had_backward {
                return Err(Error::Usage(
                    "the divide factor is set before the first backward of a step, so that all its gradients have one"
                        .into(),
                ));
            }
            state.reduce.set_scale(factor.map_or(own, |factor| (1.0 / factor) as f32));
        }
        let step = step_words(self.step_count());
        engine.note_event(format!("after its gradients' divide factor was set to {factor:?} in {step}"));
        Ok(())
    }

    /// Gives the unit's whole weights up now, and their memory if it is the unit's own
    /// ([`ReshardAfterForward::Never`]): the next pass that needs them gathers them
    /// again. The opposite of [`Fsdp::unshard`]. `(root)` is the root.
    ///
    /// # Errors
    /// If there is no unit of this path; if its weights are in use, as the root's are between a forward and its backward; a
    /// failure of the streams.
    pub fn reshard(&self, unit: &str) -> Result<()> {
        let engine = self.engine();
        let index = engine.unit_named(unit)?;
        if !engine.state.lock().gather.reshard(index)? {
            return Err(Error::Usage(format!(
                "the weights of unit `{}` are in use, inside its forward or backward or, for the root, between the two",
                engine.unit_name(index)
            )));
        }
        let event = format!("after unit `{}` was resharded in", engine.unit_name(index));
        engine.note_event(format!("{event} {}", step_words(self.step_count())));
        Ok(())
    }

    /// Sets what every unit at `path` or inside it does with its whole weights between forward and backward, from the next
    /// pass on; `(root)` stands for all units. What they have gathered is given up. The root itself stays whole between the
    /// two, whatever is said. All ranks must say the same, at the same place among their steps.
    ///
    /// ```
    /// # use fsdp_runtime::spec::ReshardAfterForward;
    /// # use fsdp_runtime::{FullyShard, Param, Unit, comm::DeviceMesh};
    /// let layers: Vec<Unit<Param>> = (0..4).map(|_| Unit::new(Param::new(8))).collect();
    /// let model = layers.fully_shard(&DeviceMesh::single())?;
    /// // The last layer's backward follows its forward at once.
    /// model.set_reshard_after_forward("3", ReshardAfterForward::Never)?;
    /// # Ok::<(), fsdp_runtime::Error>(())
    /// ```
    ///
    /// # Errors
    /// If there is no unit at `path`; inside a forward or a backward; if the pool of gathered weights is
    /// [registered](super::FsdpConfig::registration); for [`ReshardAfterForward::Ranks`] of a number that a unit was not
    /// made with, as its groups of ranks are made by [`fully_shard`](super::FullyShard::fully_shard).
    pub fn set_reshard_after_forward(&self, path: &str, mode: ReshardAfterForward) -> Result<()> {
        let engine = self.engine();
        let top = engine.unit_named(path)?;
        let inside = format!("{}.", engine.unit_path(top));
        let is_inside =
            |&unit: &usize| top == ROOT || unit == top || engine.unit_path(unit).starts_with(&inside);
        let units: Vec<usize> = (1..engine.units.len()).filter(is_inside).collect();
        if engine.config.registration.is_some() {
            return Err(Error::Config(
                "the memory of gathered weights is registered, as what the units said when the model was sharded needs it: \
                 say what they do with their weights before (`Unit::reshard_after_forward`, \
                 `FsdpConfig::reshard_after_forward`), or shard without `registration`"
                    .into(),
            ));
        }
        let differs = |&&unit: &&usize| engine.reshard[unit] != mode;
        if let (ReshardAfterForward::Ranks(ranks), Some(&unit)) = (mode, units.iter().find(differs)) {
            return Err(Error::Config(format!(
                "unit `{}` cannot be resharded to groups of {ranks} ranks from now on: groups are made when the model is \
                 sharded (`Unit::reshard_after_forward`, `FsdpConfig::reshard_after_forward`), and it was made with {:?}. \
                 `Always` and `Never` can be said at any time",
                engine.unit_name(unit),
                engine.reshard[unit]
            )));
        }
        {
            let mut state = engine.state.lock();
            if state.training != TrainingState::Idle {
                return Err(Error::Usage(
                    "what units do with their weights is set between the passes, not inside a forward or a backward".into(),
                ));
            }
            for &unit in &units {
                if !state.gather.set_reshard(unit, mode)? {
                    return Err(Error::Usage(format!(
                        "the weights of unit `{}` are in use",
                        engine.unit_name(unit)
                    )));
                }
            }
        }
        let (top, step) = (engine.unit_name(top), step_words(self.step_count()));
        engine.note_event(format!("after units at `{top}` were set to be resharded {mode:?} in {step}"));
        Ok(())
    }
}

impl GradientScaling {
    /// What the sum over `ranks` of a contribution is multiplied with when it is reduced.
    pub(crate) fn factor(self, ranks: usize) -> f32 {
        match self {
            GradientScaling::Mean => (1.0 / ranks as f64) as f32,
            GradientScaling::Sum | GradientScaling::PerToken => 1.0,
        }
    }
}

impl Engine {
    /// No gradient of this step counts, reduced or not.
    pub(crate) fn forget_gradients(state: &mut State) -> Result<(), CommError> {
        state.reduce.abandon();
        let finished = state.reduce.finish();
        state.reduce.clear();
        state.received.fill(false);
        state.tokens = TokenCount::default();
        state.forget_factors();
        state.had_backward = false;
        state.losses.clear();
        finished
    }

    /// Multiplies the reduced gradients.
    pub(crate) fn scale_main_grads(&self, factor: f64) -> Result<(), CommError> {
        for group in &self.groups {
            if let Some(grads) = &group.main_grad {
                scale(&*self.streams.compute, grads.data(), factor as f32)?;
            }
        }
        Ok(())
    }
}
