//! An exponential moving average of the weights, as a second shard.

use std::ops::Range;

use crate::comm::Phase;
use crate::device::{Slice, cast, move_towards, swap};
use crate::engine::build::agreement::agree;
use crate::engine::io::replicas::{Written, agree_on_copies};
use crate::engine::io::whole;
use crate::engine::unit::weights::settle_intact;
use crate::engine::{Ctx, Engine, Fsdp};
use crate::error::{Error, Result};
use crate::memory::Category;
use crate::spec::{Dtype, ParamSpec};

/// An exponential moving average of a model's trainable weights, in f32. Made by [`Fsdp::ema`].
///
/// It is sharded like the state of the optimizer and costs as much as one state buffer: 4 bytes for each element
/// of the shard, accounted as [`Category::WeightAverage`]. Nothing is gathered to update it. To save or load it,
/// call [`Fsdp::visit_weights`] inside [`Fsdp::with_ema`], or [`Ema::load_weights`].
///
/// ```
/// use fsdp_runtime::{FullyShard, Init, Param, launch};
///
/// launch::local(2, |world| -> fsdp_runtime::Result<()> {
///     let weights = Param::new(8).with_init(Init::Constant(1.0));
///     let mut model = weights.fully_shard(&world.data_parallel_mesh())?;
///     let mut ema = model.ema(0.75)?;
///     // What an optimizer's step would do:
///     model.load_weights(|_, _, values| Ok(values.fill(5.0)))?;
///     ema.update(&model)?;
///     model.with_ema(&mut ema, |model| model.visit_weights(|_, values| Ok(assert_eq!(values, [2.0; 8]))))?;
///     model.visit_weights(|_, values| Ok(assert_eq!(values, [5.0; 8])))
/// })?;
/// # Ok::<(), fsdp_runtime::launch::LaunchError>(())
/// ```
#[derive(Debug)]
pub struct Ema {
    engine: usize,
    decay: f64,
    warmup: bool,
    updates: u64,
    /// The average of each bucket's weights, `None` for frozen ones.
    pub(crate) shards: Vec<Option<Slice>>,
    agreed: bool,
}

impl<M> Fsdp<M> {
    /// An average that begins with the present weights: each [`Ema::update`] keeps `decay` of it (0.999, for
    /// instance) and takes the rest from the weights.
    ///
    /// Every rank must call it; nothing is communicated.
    ///
    /// # Errors
    /// If `decay` is not at least 0 and below 1, if weights are trained in 16 bits without main weights
    /// ([`MixedPrecision::main_weights`](crate::spec::MixedPrecision::main_weights)), and those of the streams.
    pub fn ema(&self, decay: f64) -> Result<Ema> {
        if !(0.0..1.0).contains(&decay) {
            let message = format!("the decay of an average must be at least 0 and below 1, not {decay}");
            return Err(Error::Config(message));
        }
        let ctx = &self.engine().ctx;
        let narrow = |weights: Slice| weights.dtype() != Dtype::F32;
        if averaged_weights(ctx).flatten().any(narrow) {
            return Err(Error::Config(
                "an average of 16-bit weights needs their main weights: set `MixedPrecision::main_weights`"
                    .into(),
            ));
        }
        self.engine().settle_intact()?;
        let shard = |weights: Slice| -> Result<Slice> {
            // SAFETY: the average keeps it, and all calls that use it borrow the average: those that write it mutably.
            // They use it on the compute stream, or on the host when that has passed all work on it.
            let shard =
                unsafe { ctx.account().allocate(Category::WeightAverage, Dtype::F32, weights.len()) }?;
            // Nothing is under way that writes the weights (`settle`).
            cast(ctx.compute(), &weights, &shard)?;
            Ok(shard)
        };
        let shards = averaged_weights(ctx).map(|weights| weights.map(shard).transpose());
        let shards = shards.collect::<Result<_>>()?;
        Ok(Ema { engine: ctx.id, decay, warmup: false, updates: 0, shards, agreed: false })
    }

    /// Runs `evaluate` on the model with the averaged weights in place of its own; afterwards the model has its
    /// own weights back, bit for bit, whether it fails or not. Frozen weights stay as they are. The loss of an
    /// earlier forward can no longer be used for a backward, as after a step.
    ///
    /// Every rank must call it. The closure has the model by shared reference: no optimizer can step it.
    ///
    /// # Errors
    /// If the average is another model's, or ranks hold copies of it that differ; those of `evaluate` and of the streams.
    pub fn with_ema<T>(&mut self, ema: &mut Ema, evaluate: impl FnOnce(&Fsdp<M>) -> Result<T>) -> Result<T> {
        self.exchanged(ema, |model| {
            agree_on_copies(model.engine(), Written::Owned, Ok(()))?;
            evaluate(model)
        })
    }

    /// Runs `run` on the model with the averaged weights in place of its own, and its own in place of the average.
    fn exchanged<T>(&mut self, ema: &mut Ema, run: impl FnOnce(&mut Fsdp<M>) -> Result<T>) -> Result<T> {
        let engine = self.engine().clone();
        ema.check(&engine.ctx)?;
        exchange_weights(&engine, &ema.shards)?;
        let mut exchanged = Exchanged { engine: &engine, shards: &ema.shards, back: false };
        let outcome = run(self);
        exchanged.back = true;
        let back = exchange_weights(&engine, &ema.shards);
        let value = outcome?;
        back?;
        Ok(value)
    }
}

/// Gives the model its own weights back if what runs meanwhile unwinds.
struct Exchanged<'a> {
    engine: &'a Engine,
    shards: &'a [Option<Slice>],
    back: bool,
}

impl Drop for Exchanged<'_> {
    fn drop(&mut self) {
        if !self.back {
            // A stream that has failed fails whatever comes next with the same error.
            let _ = exchange_weights(self.engine, self.shards);
        }
    }
}

impl Ema {
    /// Averages over the short past at first: update `t`, from 1, keeps `min(decay, (1 + t) / (10 + t))`.
    pub fn warmup(mut self) -> Self {
        self.warmup = true;
        self
    }

    /// What the next update keeps.
    pub fn next_decay(&self) -> f64 {
        let t = self.updates as f64 + 1.0;
        if self.warmup { self.decay.min((1.0 + t) / (10.0 + t)) } else { self.decay }
    }

    /// Updates so far.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Sets the number of updates so far, on which the warm-up depends: to go on from a checkpoint. The same on
    /// all ranks.
    pub fn set_updates(&mut self, updates: u64) {
        self.updates = updates;
        self.agreed = false;
    }

    /// Sets the averages, as [`Fsdp::load_weights`] sets weights: `read(spec, elements, values)` fills `values`, which begin
    /// as the present averages. Frozen weights, which have none, are set themselves.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// If the average is another model's, and as for [`Fsdp::load_weights`].
    pub fn load_weights<M>(
        &mut self,
        model: &mut Fsdp<M>,
        read: impl FnMut(&ParamSpec, Range<usize>, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        model.exchanged(self, |model| model.load_weights(read))
    }

    /// Moves the average towards the model's weights, as they are after an optimizer step.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// If the average is another model's, (in the first update) the ranks' decays differ, and those of the
    /// streams.
    pub fn update<M>(&mut self, model: &Fsdp<M>) -> Result<()> {
        let (ctx, step) = (&model.engine().ctx, &mut model.engine().step());
        self.check(ctx)?;
        if !self.agreed {
            let Ema { decay, warmup, updates, .. } = self;
            let line = format!("average of the weights: decay {decay}, warm-up {warmup}, {updates} updates");
            agree(ctx, step, ("average of the weights", Phase::Optimizer), &[line])?;
            self.agreed = true;
        }
        settle_intact(ctx, step)?;
        let decay = self.next_decay();
        for (shard, weights) in self.shards.iter().zip(averaged_weights(ctx)) {
            let (Some(shard), Some(weights)) = (shard, weights) else { continue };
            // Nothing is under way that uses either (`settle`).
            move_towards(ctx.compute(), shard, &weights, decay)?;
        }
        self.updates += 1;
        step.note_event(ctx, format!("after update {} of an average of the weights", self.updates));
        Ok(())
    }

    pub(crate) fn check(&self, ctx: &Ctx) -> Result<()> {
        if ctx.id != self.engine {
            return Err(Error::Usage("this average was made by another model's `ema(..)`".into()));
        }
        Ok(())
    }
}

/// The f32 weights of each trainable bucket that this rank's optimizer updates.
fn averaged_weights(ctx: &Ctx) -> impl Iterator<Item = Option<Slice>> {
    ctx.resources.buckets.iter().map(|bucket| {
        let owned = bucket.owned.clone();
        bucket.layout.key.requires_grad.then(|| bucket.optimizer_weight().part(owned))
    })
}

/// Exchanges the optimizer's weights with `shards`, and installs them as model weights.
fn exchange_weights(engine: &Engine, shards: &[Option<Slice>]) -> Result<()> {
    let (ctx, step) = (&engine.ctx, &mut *engine.step());
    settle_intact(ctx, step)?;
    for (shard, weights) in shards.iter().zip(averaged_weights(ctx)) {
        let (Some(shard), Some(weights)) = (shard, weights) else { continue };
        swap(ctx.compute(), shard, &weights)?;
    }
    whole::install_optimized_model_weights(ctx, step)
}
