//! Gradients per valid token: each rank brings the sum of its tokens' losses and their number, and what all ranks
//! and microbatches bring is divided once, by the global number.

use candle_core::Tensor;

use crate::comm::{HostOp, Phase};
use crate::engine::api::joined;
use crate::engine::unit::gradients;
use crate::engine::{Ctx, Fsdp, GradientScaling, Locked};
use crate::error::{Error, Result};

/// The tokens of one optimizer step.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TokenCount {
    /// Valid tokens of this rank.
    own: u64,
    /// The gradients are divided.
    divided: bool,
}

impl<M> Fsdp<M> {
    /// [`Fsdp::backward`] under [`GradientScaling::PerToken`]: `loss` is the sum of the losses of this rank's valid
    /// tokens in this microbatch, `tokens` their number, which may be 0.
    ///
    /// # Errors
    /// If the scaling is another one, if gradients of this step were divided already, and as for
    /// [`Fsdp::backward`].
    pub fn backward_tokens(&self, loss: &Tensor, tokens: u64) -> Result<()> {
        let engine = self.engine();
        let scaling = engine.ctx.config.scaling;
        if scaling != GradientScaling::PerToken {
            return Err(Error::Usage(format!(
                "`backward_tokens` is for `GradientScaling::PerToken`, and the model's is `{scaling:?}`: call `backward`"
            )));
        }
        if engine.step().gradients.tokens.divided {
            return Err(Error::Usage(
                "the gradients of this step were divided by its tokens already (by clipping, or by being read): \
                 step the optimizer first"
                    .into(),
            ));
        }
        joined::run_backward(&[engine], loss, None)?;
        // Of a backward that failed nothing counts.
        engine.step().gradients.tokens.own += tokens;
        Ok(())
    }

    /// Whether any rank has a batch left, this one having said whether it has: for ranks whose data do not run out
    /// together. One that has none goes on with the others and contributes nothing: under
    /// [`GradientScaling::PerToken`] on a batch whose loss and gradients are zero (zeros, or targets that are all
    /// ignored) and no tokens, which leaves the gradients exactly what the others make them. To multiply a loss by
    /// the number 0 is not the same: candle then leaves the graph out, and the rank its reductions.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fsdp_runtime::{Forward, FsdpConfig, FullyShard, GradientScaling, Param, Scope, launch};
    /// # use fsdp_runtime::{FsdpUnit, optim::Sgd, engine::Walker};
    /// # struct Net(Param);
    /// # impl FsdpUnit for Net {
    /// #     fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) { self.0.walk(walker); }
    /// # }
    /// # impl Forward for Net {
    /// #     fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> candle_core::Result<Tensor> {
    /// #         (x * self.0.tensor(scope)?)?.sum_all()
    /// #     }
    /// # }
    /// launch::local(2, |world| -> fsdp_runtime::Result<()> {
    ///     let config = FsdpConfig { scaling: GradientScaling::PerToken, ..FsdpConfig::default() };
    /// #   let net = Net(Param::new(()));
    ///     let mut model = net.fully_shard_with(&world.data_parallel_mesh(), &config)?;
    ///     let mut optimizer = model.optimizer(Sgd::default())?;
    ///     let mut batches = (0..2 + world.rank()).map(|_| Tensor::new(1f32, &Device::Cpu));
    ///     loop {
    ///         let batch = batches.next().transpose()?;
    ///         if !model.join(batch.is_some())? {
    ///             break;
    ///         }
    ///         let (batch, weight) = match batch {
    ///             Some(batch) => (batch, 1),
    ///             None => (Tensor::new(0f32, &Device::Cpu)?, 0),
    ///         };
    ///         let loss: Tensor = model.forward(&batch)?;
    ///         model.backward_tokens(&loss, weight)?;
    ///         optimizer.step(&mut model)?;
    ///     }
    ///     assert_eq!(model.step_count(), 3);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), fsdp_runtime::launch::LaunchError>(())
    /// ```
    ///
    /// # Errors
    /// Those of the exchange between ranks.
    pub fn join(&self, has_batch: bool) -> Result<bool> {
        let engine = self.engine();
        let mut any = [f64::from(u8::from(has_batch))];
        engine.ctx.host_reduce(&mut engine.step(), ("join", Phase::Setup), HostOp::Max, &mut any)?;
        Ok(any[0] > 0.0)
    }
}

/// Divides the reduced gradients by the global number of valid tokens, once a step.
///
/// # Errors
/// If there are no tokens; the gradients are left as they are.
pub(crate) fn divide(ctx: &Ctx, step: &mut Locked<'_>) -> Result<()> {
    if ctx.config.scaling != GradientScaling::PerToken {
        return Ok(());
    }
    let TokenCount { own, divided } = step.gradients.tokens;
    if divided || !step.units.iter().any(|unit| unit.grads.has_gradient()) {
        return Ok(());
    }
    let mut total = [own as f64];
    ctx.host_reduce(step, ("valid tokens", Phase::Optimizer), HostOp::Sum, &mut total)?;
    if total[0] == 0.0 {
        return Err(Error::Usage(
            "the global valid token count is 0: no rank had a valid token in this step, so there is no gradient to \
             step with; call `reset_step` to go on"
                .into(),
        ));
    }
    gradients::scale_main(ctx, 1.0 / total[0])?;
    step.gradients.tokens.divided = true;
    Ok(())
}
