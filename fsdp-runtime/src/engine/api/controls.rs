//! What a training loop does between its passes: forget gradients, scale them, set what they are divided by, give up whole
//! weights, and say when they are given up.

use crate::engine::optim::in_backward;
use crate::engine::unit::gradients;
use crate::engine::{Fsdp, GradientScaling, UnitId};
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
        let (ctx, step) = (&engine.ctx, &mut *engine.step());
        if !step.is_idle() {
            return Err(Error::Usage(
                "gradients are zeroed between the passes, not inside a forward or a backward; `reset_step` ends one \
                 that was cut short"
                    .into(),
            ));
        }
        step.forget_gradients()?;
        step.note_change(ctx, "its gradients were zeroed");
        Ok(())
    }

    /// Multiplies the gradients of this step so far by `factor`, after they are reduced; later microbatches are not
    /// scaled. A norm is that of the scaled gradients, and a factor that clipping has found stays.
    ///
    /// # Errors
    /// If f32 has no such `factor` (it is not finite there, or becomes 0), gradients are stepped in the backward
    /// ([`FsdpConfig::step_in_backward`](crate::engine::FsdpConfig::step_in_backward)), and those of the reductions.
    pub fn scale_gradients(&self, factor: f64) -> Result<()> {
        let engine = self.engine();
        let narrow = factor as f32;
        if !narrow.is_finite() || (narrow == 0.0 && factor != 0.0) {
            return Err(Error::Config(format!(
                "gradients are scaled by a finite factor that f32 holds, not by {factor}"
            )));
        }
        let (ctx, step) = (&engine.ctx, &mut engine.step());
        in_backward::refuse(ctx, "scaling gradients")?;
        gradients::finish(ctx, step)?;
        gradients::scale_main(ctx, factor)?;
        // What was not finite is not made so.
        let norm = &mut step.gradients.factors.norm;
        *norm = norm.filter(|norm| !norm.is_finite());
        step.note_change(ctx, format_args!("its gradients were scaled by {factor}"));
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
        let (ctx, step) = (&engine.ctx, &mut *engine.step());
        if ctx.config.scaling == GradientScaling::PerToken {
            return Err(Error::Config(
                "gradients are divided by the number of tokens (`GradientScaling::PerToken`), not by a factor".into(),
            ));
        }
        if step.gradients.had_backward {
            return Err(Error::Usage(
                "the divide factor is set before the first backward of a step, so that all its gradients have one"
                    .into(),
            ));
        }
        let own = ctx.config.scaling.factor(ctx.comm.size());
        step.reduce.set_scale(factor.map_or(own, |factor| (1.0 / factor) as f32));
        step.note_change(ctx, format_args!("its gradients' divide factor was set to {factor:?}"));
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
        let (ctx, step) = (&engine.ctx, &mut *engine.step());
        let unit = ctx.unit_named(unit)?;
        let name = ctx.unit_name(unit);
        if !step.gather.reshard(&mut step.units, unit)? {
            return Err(Error::Usage(format!(
                "the weights of unit `{name}` are in use, inside its forward or backward or, for the root, between the two"
            )));
        }
        step.note_change(ctx, format_args!("unit `{name}` was resharded"));
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
    /// [registered](crate::engine::FsdpConfig::registration); for [`ReshardAfterForward::Ranks`] of a number that a unit was not
    /// made with, as its groups of ranks are made by [`fully_shard`](crate::engine::FullyShard::fully_shard).
    pub fn set_reshard_after_forward(&self, path: &str, mode: ReshardAfterForward) -> Result<()> {
        let engine = self.engine();
        let (ctx, step) = (&engine.ctx, &mut *engine.step());
        let top = ctx.unit_named(path)?;
        let inside = format!("{}.", ctx.unit(top).path);
        let is_inside =
            |&unit: &UnitId| top == UnitId::ROOT || unit == top || ctx.unit(unit).path.starts_with(&inside);
        let units: Vec<UnitId> = step.units.ids().skip(1).filter(is_inside).collect();
        if ctx.config.registration.is_some() {
            return Err(Error::Config(
                "the memory of gathered weights is registered, as what the units said when the model was sharded needs it: \
                 say what they do with their weights before (`Unit::reshard_after_forward`, \
                 `FsdpConfig::reshard_after_forward`), or shard without `registration`"
                    .into(),
            ));
        }
        let differs = |&&unit: &&UnitId| ctx.unit(unit).reshard != mode;
        if let (ReshardAfterForward::Ranks(ranks), Some(&unit)) = (mode, units.iter().find(differs)) {
            return Err(Error::Config(format!(
                "unit `{}` cannot be resharded to groups of {ranks} ranks from now on: groups are made when the model is \
                 sharded (`Unit::reshard_after_forward`, `FsdpConfig::reshard_after_forward`), and it was made with {:?}. \
                 `Always` and `Never` can be said at any time",
                ctx.unit_name(unit),
                ctx.unit(unit).reshard
            )));
        }
        if !step.is_idle() {
            return Err(Error::Usage(
                "what units do with their weights is set between the passes, not inside a forward or a backward".into(),
            ));
        }
        for &unit in &units {
            if !step.gather.set_reshard(&mut step.units, unit, mode)? {
                let unit = ctx.unit_name(unit);
                return Err(Error::Usage(format!("the weights of unit `{unit}` are in use")));
            }
        }
        let top = ctx.unit_name(top);
        step.note_change(ctx, format_args!("units at `{top}` were set to be resharded {mode:?}"));
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
