//! `Fsdp<M>`: a sharded model, as the user's training loop sees it.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;

use crate::comm::Phase;
use crate::device::TensorDevice;
use crate::engine::api::joined;
use crate::engine::api::scope::{Frame, Place};
use crate::engine::build::settings::check_prefetch;
use crate::engine::io::load;
use crate::engine::io::whole::{self, Shown};
use crate::engine::optim::in_backward;
use crate::engine::schedule::Prefetch;
use crate::engine::unit::gradients;
use crate::engine::{Ctx, Engine, Forward, GradientScaling, UnitId};
use crate::error::{Error, Result};
use crate::layout::ModelLayout;
use crate::spec::{ParamSpec, Strategy};

/// A model whose parameters, gradients and optimizer state are sharded over the ranks of a mesh.
///
/// Unless a method says otherwise, every rank must call it, in the same order.
///
/// It is one thread's at a time (`Send`, not `Sync`): what a rank computes is ordered by the thread that computes it. What
/// writes weights borrows the model mutably, so that nothing can read them meanwhile, not even the closure that brings the
/// values.
pub struct Fsdp<M> {
    module: M,
    engine: Arc<Engine>,
    /// Keeps shared references in the thread.
    _not_sync: PhantomData<Cell<()>>,
}

impl<M> std::fmt::Debug for Fsdp<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Fsdp<{}>({:?})", std::any::type_name::<M>(), self.engine)
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Ctx { comm, config, .. } = &self.ctx;
        write!(f, "Engine(rank {} of {}, {})", comm.rank(), comm.size(), config.strategy)
    }
}

impl<M> Fsdp<M> {
    pub(crate) fn new(module: M, engine: Arc<Engine>) -> Self {
        Fsdp { module, engine, _not_sync: PhantomData }
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// The user's model.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.engine.ctx.comm.rank()
    }

    /// Number of ranks of the mesh.
    pub fn world_size(&self) -> usize {
        self.engine.ctx.comm.size()
    }

    /// candle's device that the model is on, where its inputs belong.
    pub fn device(&self) -> &candle_core::Device {
        self.engine.ctx.backend.tensors()
    }

    /// The configured strategy, in force on any number of ranks.
    pub fn strategy(&self) -> Strategy {
        self.engine.ctx.config.strategy
    }

    /// Where every parameter lives.
    pub fn layout(&self) -> &ModelLayout {
        &self.engine.ctx.layout
    }

    /// Number of optimizer steps taken.
    pub fn step_count(&self) -> u64 {
        self.engine.step().number
    }

    /// Runs the model for training on this rank's input and keeps what the backward needs.
    ///
    /// # Errors
    /// Those of the model and of the gathers.
    pub fn forward<I, O>(&self, input: &I) -> Result<O>
    where
        M: Forward<(), I, O>,
    {
        self.run(input, &(), true)
    }

    /// [`Fsdp::forward`] for a model that takes a context.
    ///
    /// # Errors
    /// As for [`Fsdp::forward`].
    pub fn forward_with<C, I, O>(&self, input: &I, context: &C) -> Result<O>
    where
        M: Forward<C, I, O>,
    {
        self.run(input, context, true)
    }

    /// Says which samples of the step's global batch the next training forward of this rank has: those from `sample` on.
    /// Random streams, those of dropout for instance, are then the same for any number of ranks and microbatches.
    /// Unsaid, each rank and microbatch has streams of its own. Local.
    pub fn set_first_sample(&self, sample: u64) {
        self.engine.step().first_sample = Some(sample);
    }

    /// Runs the model for evaluation: no graph is built, and afterwards every unit is sharded.
    ///
    /// # Errors
    /// As for [`Fsdp::forward`].
    pub fn evaluate<I, O>(&self, input: &I) -> Result<O>
    where
        M: Forward<(), I, O>,
    {
        self.run(input, &(), false)
    }

    /// [`Fsdp::evaluate`] for a model that takes a context.
    ///
    /// # Errors
    /// As for [`Fsdp::forward`].
    pub fn evaluate_with<C, I, O>(&self, input: &I, context: &C) -> Result<O>
    where
        M: Forward<C, I, O>,
    {
        self.run(input, context, false)
    }

    fn run<C, I, O>(&self, input: &I, context: &C, training: bool) -> Result<O>
    where
        M: Forward<C, I, O>,
    {
        let engine = &self.engine;
        let (root, random) = engine.begin_forward()?;
        let span = engine.ctx.begin_span("model forward", &engine.ctx.unit(UnitId::ROOT).path);
        let (unit, enclosing) = (UnitId::ROOT, Vec::new());
        let place = Place { engine: engine.clone(), unit, enclosing, training, recomputing: false, random };
        let output = self.module.forward(input, context, &Frame::new(place, training).scope());
        engine.ctx.end_span(span);
        let ended = engine.end_forward(root, training, output.is_ok());
        let output = output.map_err(|error| {
            let error = engine.note_unit_failure(UnitId::ROOT, Some(Phase::Forward), error);
            engine.explain(error)
        })?;
        ended?;
        Ok(output)
    }

    /// Runs the backward of `loss`, a scalar that [`Fsdp::forward`] returned or that was computed from what
    /// it returned. Gradients of this microbatch are added to those of earlier ones; their reduction overlaps
    /// the backward. Forwards of later microbatches may come before it, as in a pipeline's one-forward-one-backward
    /// schedule; the order is that of the ranks, all alike.
    ///
    /// # Errors
    /// If `loss` is not a scalar or not finite (with `check_finite`), is detached or was computed by another model (see
    /// [`Fsdp::backward_with`] for a loss of several), without a forward before it, and those of recomputation and of the reductions. After an error, [`Fsdp::reset_step`] makes the model usable
    /// again.
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        if self.engine.ctx.config.scaling == GradientScaling::PerToken {
            return Err(Error::Usage(
                "gradients are scaled per token: call `backward_tokens` with the sum of the tokens' losses and their \
                 number"
                    .into(),
            ));
        }
        in_backward::refuse(&self.engine.ctx, "a backward without a step")?;
        joined::run_backward(&[&self.engine], loss, None)
    }

    /// Whether the next backward is the last of its optimizer step (the default). ZeRO-2 and 3 reduce among the
    /// inner ranks in every microbatch, ZeRO-0 and 1 only in the last; the outer ranks' reduction is in the last.
    pub fn set_is_last_microbatch(&self, last: bool) {
        self.engine.step().set_last_microbatch(&self.engine.ctx, last);
    }

    /// Until the guard is dropped, backwards reduce nothing: whole gradients stay on the rank, and the next
    /// backward adds to them. Of several guards, the last that is dropped counts. Afterwards
    /// [`Fsdp::set_is_last_microbatch`] counts again, as it was called last, before the guard or under it.
    ///
    /// Under ZeRO-2 and 3 that takes memory for the whole gradients of every unit, in the reduction's dtype, in which they
    /// are added up, until they are reduced; ZeRO-0 and 1 hold them whole anyway. Where that is too much, use
    /// [`Fsdp::set_is_last_microbatch`].
    pub fn no_sync(&self) -> NoSync<'_> {
        self.engine.step().begin_no_sync(&self.engine.ctx);
        NoSync { engine: &self.engine }
    }

    /// Sets how many units are gathered ahead of the present one, in forwards and in backwards, as far as a
    /// [`gather_budget`](crate::engine::FsdpConfig::gather_budget) has room for them. Takes effect at the next unit: the pool of
    /// gathered weights then holds one unit more than the larger number, two at least. All ranks must say the same, at the same place among their steps: where they do not, the next collective is an error that tells it.
    ///
    /// # Errors
    /// If the pool is registered and was made for fewer units ahead.
    pub fn set_prefetch(&self, forward: usize, backward: usize) -> Result<()> {
        check_prefetch(&self.engine.ctx.config, forward.max(backward))?;
        let mut step = self.engine.step();
        step.gather.set_prefetch(Prefetch { forward, backward });
        step.note(&self.engine.ctx);
        Ok(())
    }

    /// Starts the gather of a unit's weights now, ahead of its forward: for those who know better than the learnt
    /// order what comes next. The weights stay until another unit needs the memory, or they change.
    ///
    /// # Errors
    /// If there is no unit of this path, and those of the gather.
    pub fn unshard(&self, unit: &str) -> Result<Unsharding<'_>> {
        let engine = &*self.engine;
        let unit = engine.ctx.unit_named(unit)?;
        let step = &mut *engine.step();
        let moment = step.moment(Phase::Forward);
        step.gather.start(&mut step.units, unit, moment)?;
        Ok(Unsharding { engine, unit })
    }

    /// Reduces the gradients that are still the rank's own (ZeRO-0 and 1, if every microbatch so far ran under
    /// [`Fsdp::no_sync`]) and waits, in stream order, until all are reduced. [`Fsdp::clip_grad_norm`] and the optimizer do
    /// it themselves.
    ///
    /// # Errors
    /// Those of the reductions.
    pub fn finish_grad_sync(&self) -> Result<()> {
        gradients::finish(&self.engine.ctx, &mut self.engine.step())
    }

    /// Casts the main weights that the optimizer has changed into the model weights, and marks what was
    /// gathered as out of date. The optimizer's step does it; needed only by those who write main weights
    /// themselves.
    ///
    /// # Errors
    /// Those of the streams.
    pub fn install_optimized_model_weights(&mut self) -> Result<()> {
        whole::install_optimized_model_weights(&self.engine.ctx, &mut self.engine.step())
    }

    /// Forgets the gradients of this step and whatever an error has cut short: every unit is sharded
    /// afterwards, and a forward can begin.
    ///
    /// # Errors
    /// A failure of the streams or of the ranks, which nothing undoes.
    pub fn reset_step(&mut self) -> Result<()> {
        let (ctx, step) = (&self.engine.ctx, &mut *self.engine.step());
        step.abort(ctx)?;
        step.note_change(ctx, "a reset");
        Ok(())
    }

    /// Names of the trainable parameters that got no gradient on any rank since the last optimizer step: a
    /// hint that an op without backward cuts the graph.
    ///
    /// In the first step, zeros that come from a graph cut above a unit do not count as a gradient; later they do.
    ///
    /// # Errors
    /// Those of the exchange between ranks.
    pub fn parameters_without_gradient(&self) -> Result<Vec<String>> {
        whole::parameters_without_gradient(&self.engine.ctx, &mut self.engine.step())
    }

    /// Paths of the units whose weights are gathered now, `(root)` for the root; empty after evaluation and after an
    /// optimizer step. Local.
    pub fn gathered_units(&self) -> Vec<String> {
        let step = self.engine.step();
        let gathered = step.units.entries().filter(|(_, unit)| unit.weights.is_gathered());
        gathered.map(|(unit, _)| self.engine.ctx.unit_name(unit).to_owned()).collect()
    }

    /// Sets the weights: `read(spec, elements, values)` fills `values` with these elements of the flattened
    /// parameter (row-major), for each part that this rank holds; they begin as the present ones. Main weights take the values as they are,
    /// 16-bit model weights round them.
    ///
    /// Every rank must call it. Ranks that hold copies, with [`Strategy::NoShard`](crate::spec::Strategy::NoShard) or along
    /// `dp_outer`, exchange a checksum for each parameter: all must write the same values.
    ///
    /// # Errors
    /// Those of `read`, where there are copies on all ranks; copies that differ, on all ranks, with the parameter, the
    /// element, the ranks and their values. The weights are then changed, in part or on each rank in another way: load
    /// again.
    pub fn load_weights(
        &mut self,
        mut read: impl FnMut(&ParamSpec, Range<usize>, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        self.engine.step().note_change(&self.engine.ctx, "a load");
        load::fill_weights(&self.engine, None, |_, spec, range, out| read(spec, range, out))
    }

    /// Gathers every parameter, one bucket at a time, and shows it whole to `visit` on every rank: main
    /// weights where there are any, else model weights. Padding is not shown, tied parameters once.
    ///
    /// # Errors
    /// Those of `visit` and of the gathers.
    pub fn visit_weights(&self, visit: impl FnMut(&ParamSpec, &[f32]) -> Result<()>) -> Result<()> {
        whole::visit(&self.engine, Shown::Weights, None, visit)
    }

    /// Shows each parameter with its whole reduced gradient of the present step, before clipping. Parameters of units that have
    /// none are left out. Every rank must call it.
    ///
    /// # Errors
    /// Those of `visit` and of the gathers.
    pub fn visit_gradients(&self, visit: impl FnMut(&ParamSpec, &[f32]) -> Result<()>) -> Result<()> {
        in_backward::refuse(&self.engine.ctx, "looking at gradients")?;
        whole::visit(&self.engine, Shown::Gradients, None, visit)
    }

    /// Shows each parameter of one unit with its whole reduced gradient, before clipping; `(root)` is the root. Every rank must
    /// call it.
    ///
    /// # Errors
    /// If there is no unit of this path, and as for [`Fsdp::visit_gradients`].
    pub fn visit_unit_gradients(
        &self,
        unit: &str,
        visit: impl FnMut(&ParamSpec, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let unit = self.engine.ctx.unit_named(unit)?;
        whole::visit(&self.engine, Shown::Gradients, Some(unit), visit)
    }
}

/// See [`Fsdp::no_sync`].
#[derive(Debug)]
#[must_use = "synchronisation is as before as soon as this is dropped"]
pub struct NoSync<'a> {
    engine: &'a Engine,
}

impl Drop for NoSync<'_> {
    fn drop(&mut self) {
        self.engine.step().end_no_sync(&self.engine.ctx);
    }
}

/// A gather that [`Fsdp::unshard`] has started. Dropping it changes nothing.
#[derive(Debug)]
pub struct Unsharding<'a> {
    engine: &'a Engine,
    unit: UnitId,
}

impl Unsharding<'_> {
    /// Waits, in stream order, until the weights are whole. Local.
    ///
    /// # Errors
    /// Those of the gather.
    pub fn wait(self) -> Result<()> {
        let mut step = self.engine.step();
        Ok(step.units[self.unit].weights.wait(self.engine.ctx.compute())?)
    }
}
