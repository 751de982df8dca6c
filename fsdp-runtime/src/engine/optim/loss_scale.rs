//! Loss scaling around backward and step, decided alike on all ranks.

use candle_core::{DType, Tensor};

use crate::comm::Phase;
use crate::engine::build::agreement::agree;
use crate::engine::{Fsdp, OwnerOptimizer, ShardedOptimizer};
use crate::error::{Error, Result};
use crate::optim::{LossScaler, Optimizer, OwnerRule};

/// An optimizer of a sharded model, which [`LossScaler::step`] can step.
pub trait ModelOptimizer {
    /// Updates the model from its gradients and begins the next step. Returns whether the step was taken.
    ///
    /// # Errors
    /// Those of the optimizer.
    fn step<M>(&mut self, model: &mut Fsdp<M>) -> Result<bool>;
}

impl<O: Optimizer> ModelOptimizer for ShardedOptimizer<O> {
    fn step<M>(&mut self, model: &mut Fsdp<M>) -> Result<bool> {
        ShardedOptimizer::step(self, model)
    }
}

impl<R: OwnerRule, O: Optimizer> ModelOptimizer for OwnerOptimizer<R, O> {
    fn step<M>(&mut self, model: &mut Fsdp<M>) -> Result<bool> {
        OwnerOptimizer::step(self, model)
    }
}

impl LossScaler {
    /// The loss, in f32, times the scale: what to call backward on. With several microbatches, each loss is
    /// scaled; the scale does not change before the step. Local.
    ///
    /// # Errors
    /// Those of candle.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        Ok(loss.to_dtype(DType::F32)?.affine(self.current_scale(), 0.0)?)
    }

    /// Makes the model undo the scale: [`Fsdp::grad_norm`] and [`Fsdp::clip_grad_norm`] are of the unscaled
    /// gradients from here to the step, which multiplies the gradients by one factor for all of it. To be called
    /// before clipping; otherwise [`LossScaler::step`] does it. Calling it again changes nothing.
    ///
    /// Returns true if every gradient is finite, the same on all ranks: an infinity or a NaN anywhere makes the
    /// global norm infinite or NaN everywhere. Every rank must call it.
    ///
    /// # Errors
    /// If the scaled gradients were clipped, a setting is out of range, and those of the reductions.
    pub fn unscale<M>(&self, model: &Fsdp<M>) -> Result<bool> {
        self.validate()?;
        let norm = model.grad_norm()?;
        let factors = &mut model.engine().step().gradients.factors;
        if factors.unscale.is_none() {
            if factors.scale != 1.0 {
                return Err(Error::Usage(
                    "the gradients were clipped while they were scaled: call `scaler.unscale(&model)` before \
                     `model.clip_grad_norm(..)`"
                        .into(),
                ));
            }
            let factor = 1.0 / self.current_scale();
            (factors.unscale, factors.scale) = (Some(factor), factor as f32);
        }
        Ok(norm.is_finite())
    }

    /// Steps `optimizer` if every gradient on every rank is finite, and sets the next scale. Returns whether the
    /// step was taken.
    ///
    /// A skipped step leaves weights, optimizer state and the counts of steps as they are and forgets the
    /// gradients, as if the batch had never been seen. Every rank must call it.
    ///
    /// # Errors
    /// If (in the first step, or after [`LossScaler::set_state`]) the ranks' scales differ, those of
    /// [`LossScaler::unscale`], and those of the optimizer.
    pub fn step<S: ModelOptimizer, M>(&mut self, optimizer: &mut S, model: &mut Fsdp<M>) -> Result<bool> {
        if !self.agreed {
            let line = format!("loss scaler {self:?}");
            let engine = model.engine();
            agree(&engine.ctx, &mut engine.step(), ("loss scale", Phase::Optimizer), &[line])?;
            self.agreed = true;
        }
        let all_finite = self.unscale(model)?;
        if all_finite {
            optimizer.step(model)?;
        } else {
            model.reset_step()?;
        }
        self.update(all_finite);
        Ok(all_finite)
    }
}
