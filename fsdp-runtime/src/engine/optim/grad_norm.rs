//! The global norm of the gradients: clipping by it, and what is done where it is not finite.

use crate::comm::{HostOp, Phase, step_words};
use crate::device::{TensorDevice, read_f32};
use crate::engine::io::whole::{self, Shown};
use crate::engine::optim::in_backward;
use crate::engine::step::Factors;
use crate::engine::unit::gradients;
use crate::engine::{Ctx, Engine, Fsdp, Locked, NonFinite};
use crate::error::{Error, Result};
use crate::optim::{clip_scale, squared_norm};

impl<M> Fsdp<M> {
    /// Scales the gradients so that their global L2 norm is at most `max_norm`, and returns the norm before.
    ///
    /// Each element of each parameter counts once, tied ones too; each rank sums its own shard, whatever the
    /// strategy, and the ranks' sums are added in rank order, so that all ranks get the same bits. The factor
    /// `min(1, max_norm / (norm + 1e-6))` is applied by the optimizer's step.
    ///
    /// A norm that is infinite or NaN is dealt with as [`FsdpConfig::non_finite`](crate::engine::FsdpConfig::non_finite) says;
    /// after [`LossScaler::unscale`](crate::optim::LossScaler::unscale) it is returned, for the scaler decides.
    ///
    /// # Errors
    /// If `max_norm` is not positive, or the norm not finite ([`NonFinite::Error`]; the gradients are left as they are), and
    /// those of the reductions.
    pub fn clip_grad_norm(&self, max_norm: f64) -> Result<f64> {
        self.clip_grad_norm_with(max_norm, self.engine().ctx.config.non_finite)
    }

    /// [`Fsdp::clip_grad_norm`] that deals with a norm that is not finite as `non_finite` says, whatever the
    /// configuration says: for this clipping and the step after it. The same on all ranks.
    ///
    /// # Errors
    /// As for [`Fsdp::clip_grad_norm`].
    pub fn clip_grad_norm_with(&self, max_norm: f64, non_finite: NonFinite) -> Result<f64> {
        if max_norm.is_nan() || max_norm <= 0.0 {
            return Err(Error::Config(format!("the largest gradient norm must be positive, not {max_norm}")));
        }
        let engine = self.engine();
        let norm = self.grad_norm()?;
        let mut step = engine.step();
        let factors = &mut step.gradients.factors;
        factors.non_finite = Some(non_finite);
        if !norm.is_finite() && non_finite == NonFinite::Error && factors.unscale.is_none() {
            drop(step);
            return Err(non_finite_gradients(engine, norm));
        }
        factors.scale = (f64::from(clip_scale(norm, max_norm)) * factors.unscale.unwrap_or(1.0)) as f32;
        Ok(norm)
    }

    /// The global L2 norm of the gradients, of the unscaled ones after
    /// [`LossScaler::unscale`](crate::optim::LossScaler::unscale); infinite or NaN where a gradient is. It is computed once
    /// a step.
    ///
    /// # Errors
    /// Those of the reductions.
    pub fn grad_norm(&self) -> Result<f64> {
        let engine = self.engine();
        in_backward::refuse(&engine.ctx, "clipping and norms")?;
        let step = &mut engine.step();
        let norm = main_grad_norm(&engine.ctx, step)?;
        Ok(norm * step.gradients.factors.unscale.unwrap_or(1.0))
    }
}

/// The global norm of the main gradients as they are, once all are reduced.
fn main_grad_norm(ctx: &Ctx, step: &mut Locked<'_>) -> Result<f64> {
    gradients::finish(ctx, step)?;
    if let Some(known) = step.gradients.factors.norm {
        return Ok(known);
    }
    let mut shards = Vec::new();
    // Outer ranks that share nothing have the same gradients: the first ones bring them, and all take part, so
    // that no replica clips alone.
    let cut_by_outer = ctx.layout.buckets.iter().any(|bucket| bucket.outer > 1);
    let counts = cut_by_outer || ctx.outer_comm.rank() == 0;
    let with_gradient = step.units.entries().filter(|(_, unit)| counts && unit.grads.has_gradient());
    for &bucket in with_gradient.flat_map(|(unit, _)| &ctx.unit(unit).buckets) {
        let bucket = &ctx.resources.buckets[bucket];
        if let Some(grads) = &bucket.main_grad {
            shards.push(if cut_by_outer { grads.part(bucket.owned.clone()) } else { grads.shard() });
        }
    }
    let mut sum = [match ctx.backend.kernels() {
        Some(kernels) => kernels.squared_norm(&shards)?,
        // SAFETY: all reductions are done (`gradients::finish`), and nothing begins one before the next backward, which is
        // this thread's, as the model is.
        None => shards.iter().map(|shard| unsafe { read_f32(shard, squared_norm) }).sum(),
    }];
    ctx.host_reduce(step, ("gradient norm", Phase::Optimizer), HostOp::Sum, &mut sum)?;
    let norm = sum[0].sqrt();
    step.gradients.factors.norm = Some(norm);
    Ok(norm)
}

/// Whether the optimizer may step: the gradients are finite, as far as the norm is known or is to be looked at. A
/// step that is skipped is reset. The same on all ranks.
///
/// # Errors
/// If they are not finite and that is an error.
pub(crate) fn may_step(engine: &Engine) -> Result<bool> {
    let (ctx, mut step) = (&engine.ctx, engine.step());
    let Factors { norm: known, non_finite: said, .. } = step.gradients.factors;
    let policy = said.unwrap_or(ctx.config.non_finite);
    if known.is_none() && policy == NonFinite::Error && !ctx.config.check_finite {
        return Ok(true);
    }
    let norm = main_grad_norm(ctx, &mut step)?;
    if norm.is_finite() {
        return Ok(true);
    }
    match policy {
        NonFinite::Error => {
            drop(step);
            Err(non_finite_gradients(engine, norm))
        }
        NonFinite::SkipStep => {
            step.abort(ctx)?;
            let skipped = step_words(step.number);
            step.note_event(ctx, format!("after a skip of {skipped}, whose gradients are not finite"));
            Ok(false)
        }
    }
}

/// Why the norm is not finite: the first parameter whose gradient is not, and the ranks whose losses are not. Every
/// rank must ask.
fn non_finite_gradients(engine: &Engine, norm: f64) -> Error {
    let found = match (first_non_finite(engine), non_finite_losses(&engine.ctx, &mut engine.step())) {
        (Ok(gradient), Ok(losses)) => format!("{gradient}; {losses}"),
        (Err(error), _) | (_, Err(error)) => return error,
    };
    Error::Usage(format!(
        "the norm of the gradients is {norm}: {found}. Nothing was changed: call `reset_step` to go on without this \
         step, or have `NonFinite::SkipStep` do it"
    ))
}

fn first_non_finite(engine: &Engine) -> Result<String> {
    let layout = &engine.ctx.layout;
    let mut first = None;
    whole::visit(engine, Shown::Gradients, None, |spec, values| {
        if first.is_none() {
            let at = values.iter().position(|value| !value.is_finite());
            first = at.map(|at| (spec.name.clone(), at, values[at]));
        }
        Ok(())
    })?;
    Ok(match first {
        None => "the sum of the squares of its elements is out of range".into(),
        Some((name, at, value)) => {
            let param = layout.params.iter().position(|spec| spec.name == name);
            let (group, item) = layout.place_of(param.expect("it was visited"));
            let bucket = &layout.buckets[group];
            let rank = (bucket.items[item].start + at) / bucket.shard_len();
            format!("the gradient of `{name}` is {value} at element {at}, in the shard of rank {rank}")
        }
    })
}

fn non_finite_losses(ctx: &Ctx, step: &mut Locked<'_>) -> Result<String> {
    let value = |loss: &candle_core::Tensor| {
        let values = loss.to_dtype(candle_core::DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        Ok(values.into_iter().find(|value| !value.is_finite()))
    };
    let own: Vec<Option<f32>> =
        step.gradients.losses.iter().map(value).collect::<candle_core::Result<_>>()?;
    let own = own.into_iter().flatten().next();
    let own = own.map(|value| value.to_string()).unwrap_or_default();
    let all = ctx.host_gather(step, ("losses", Phase::Optimizer), own.into_bytes())?;
    let losses = all.iter().enumerate().filter(|(_, value)| !value.is_empty());
    let losses =
        losses.map(|(rank, value)| format!("a loss of rank {rank} is {}", String::from_utf8_lossy(value)));
    let losses = losses.collect::<Vec<_>>().join(", ");
    Ok(if losses.is_empty() { "the losses of all ranks are finite".into() } else { losses })
}
