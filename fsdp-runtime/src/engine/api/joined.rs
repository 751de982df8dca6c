//! The backward of a loss, which one model has computed, or several.

use std::marker::PhantomData;
use std::sync::Arc;

use candle_core::{DType, Tensor};

use crate::comm::Phase;
use crate::engine::api::unitless;
use crate::engine::optim::in_backward;
use crate::engine::unit::gradients;
use crate::engine::unit::opened::{Opened, StepsUnits};
use crate::engine::{Engine, Fsdp, GradientScaling, UnitId};
use crate::error::{Error, Result};

/// A model that takes part in the backward of a loss that another one has computed with it. Made by [`Fsdp::joined`].
#[derive(Clone, Copy, Debug)]
pub struct Joined<'a> {
    engine: &'a Arc<Engine>,
    /// Keeps it in the thread, as a reference to the model is.
    _not_send: PhantomData<*const ()>,
}

impl<M> Fsdp<M> {
    /// This model, as one of those in [`Fsdp::backward_with`].
    pub fn joined(&self) -> Joined<'_> {
        Joined { engine: self.engine(), _not_send: PhantomData }
    }

    /// [`Fsdp::backward`] of a loss that this model and `others` have computed together, as the generator of an adversarial
    /// pair whose loss comes from the discriminator, or an encoder and a decoder. Each model gets the gradients of its own
    /// parameters, once, as if each had had its backward: they are added to those of its earlier microbatches and reduced
    /// as its strategy, its `no_sync` and its scaling say. A model that is not to be trained by this loss forgets them with
    /// [`Fsdp::zero_grad`], before its next backward. All ranks must call it, with the models in the same order.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fsdp_runtime::optim::Sgd;
    /// # use fsdp_runtime::{Forward, FsdpUnit, FullyShard, Init, Param, Scope, comm::DeviceMesh, engine::Walker};
    /// # struct Dot(Param);
    /// # impl FsdpUnit for Dot {
    /// #     fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
    /// #         self.0.walk(walker);
    /// #     }
    /// # }
    /// # impl Forward for Dot {
    /// #     fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> candle_core::Result<Tensor> {
    /// #         x * self.0.tensor(scope)?
    /// #     }
    /// # }
    /// # let new = || Dot(Param::new(2).with_init(Init::Ones)).fully_shard(&DeviceMesh::single());
    /// # let (mut generator, mut discriminator) = (new()?, new()?);
    /// # let mut generator_optimizer = generator.optimizer(Sgd::default())?;
    /// # let mut discriminator_optimizer = discriminator.optimizer(Sgd::default())?;
    /// # let (noise, real) = (Tensor::new(&[1f32, 2.0], &Device::Cpu)?, Tensor::new(&[3f32, 4.0], &Device::Cpu)?);
    /// // The discriminator learns from what the generator has made, which is detached.
    /// let fake: Tensor = generator.evaluate(&noise)?;
    /// let (on_fake, on_real): (Tensor, Tensor) = (discriminator.forward(&fake)?, discriminator.forward(&real)?);
    /// discriminator.backward(&(on_fake.sum_all()? - on_real.sum_all()?)?)?;
    /// discriminator_optimizer.step(&mut discriminator)?;
    ///
    /// // The generator learns through the discriminator, which forgets its part.
    /// let fake: Tensor = generator.forward(&noise)?;
    /// let score: Tensor = discriminator.forward(&fake)?;
    /// generator.backward_with(&score.sum_all()?.neg()?, &[discriminator.joined()])?;
    /// generator_optimizer.step(&mut generator)?;
    /// discriminator.zero_grad()?;
    /// # Ok::<(), fsdp_runtime::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Fsdp::backward`], of each model; if the loss was not computed with one of them, or one is named twice. After
    /// an error inside the backward each of the models has forgotten the gradients of its step.
    pub fn backward_with(&self, loss: &Tensor, others: &[Joined<'_>]) -> Result<()> {
        let engines: Vec<&Arc<Engine>> =
            std::iter::once(self.engine()).chain(others.iter().map(|joined| joined.engine)).collect();
        for (index, engine) in engines.iter().enumerate() {
            if engines[..index].iter().any(|earlier| earlier.id() == engine.id()) {
                return Err(Error::Usage(format!(
                    "model `{}` is named twice among those of one backward: name each that the loss was computed with \
                     besides the one whose `backward_with` is called",
                    engine.ctx.name
                )));
            }
            if engine.ctx.config.scaling == GradientScaling::PerToken {
                return Err(Error::Usage(format!(
                    "the gradients of model `{}` are scaled per token: a backward of several models is for those with \
                     `GradientScaling::Mean` or `GradientScaling::Sum`",
                    engine.ctx.name
                )));
            }
            in_backward::refuse(&engine.ctx, "a backward without a step")?;
        }
        run_backward(&engines, loss, None)
    }
}

/// The backward of `loss`, by the first of these models, with the others; in it `steps` steps units when their gradients are
/// reduced, if it is to.
pub(crate) fn run_backward(
    engines: &[&Arc<Engine>],
    loss: &Tensor,
    steps: Option<&dyn StepsUnits>,
) -> Result<()> {
    if loss.elem_count() != 1 {
        return Err(Error::Usage(format!(
            "backward starts from a scalar loss, not from a tensor of shape {:?}",
            loss.shape()
        )));
    }
    if let Some(engine) = engines.iter().find(|engine| engine.ctx.config.check_finite) {
        let value = loss.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?[0];
        if !value.is_finite() {
            let message =
                format!("the loss is {value}, and no unit's output was: it arose outside the units");
            return Err(engine.unit_error(UnitId::ROOT, Phase::Forward, message));
        }
    }
    // What is refused has cost none of them anything.
    engines.iter().try_for_each(|engine| engine.check_backward(loss))?;
    let begun = engines.iter().try_for_each(|engine| engine.begin_backward(loss));
    let outcome = begun.and_then(|()| walk(engines, loss, steps));
    if outcome.is_err() {
        // The error that counts is the first one.
        engines.iter().for_each(|engine| drop(engine.reset_step()));
    }
    outcome
}

fn walk(engines: &[&Arc<Engine>], loss: &Tensor, steps: Option<&dyn StepsUnits>) -> Result<()> {
    let first = engines[0];
    let span = first.ctx.begin_span("model backward", &first.ctx.unit(UnitId::ROOT).path);
    let mut grads = {
        let _opened = Opened::by(engines, steps);
        loss.backward().map_err(|error| {
            let noted = engines.iter().find_map(|engine| engine.noted_failure());
            noted.unwrap_or_else(|| {
                let error = first.note_unit_failure(UnitId::ROOT, Some(Phase::Backward), error);
                first.explain(error)
            })
        })?
    };
    for engine in engines {
        gradients::collect(engine, UnitId::ROOT, &[], &mut grads)?;
    }
    engines.iter().try_for_each(|engine| engine.step().check_reached(&engine.ctx))?;
    first.ctx.end_span(span);
    engines.iter().try_for_each(|engine| engine.end_backward(steps))?;
    engines.iter().for_each(|engine| unitless::note_backward_of(engine, loss));
    Ok(())
}
