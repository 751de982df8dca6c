//! The autograd boundary around a unit.
//!
//! The outer graph sees a unit as one op. Its forward runs the user's module on a detached input while the
//! unit is unsharded and keeps the inner graph (or, with recomputation, only the input). Its backward is
//! where the hooks live: unshard, run the inner backward seeded with the incoming gradient, collect the
//! parameters' gradients, reshard, reduce.

use std::sync::Arc;

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, DType, Layout, Result, Shape, Storage, Tensor, Var,
};
use parking_lot::Mutex;

use super::gradients::{self, Expectation, is_alive};
use crate::comm::Phase;
use crate::engine::api::scope::{Frame, Place};
use crate::engine::core::UnitGuard;
use crate::engine::io::buffers::{BufferValues, buffer_values};
use crate::engine::{Forward, Param, Scope, Tensors};
use crate::memory::share_storage;

pub(super) fn cast_floats<T: Tensors>(tensors: &T, to: Option<DType>) -> Result<T> {
    let (packed, shapes) = tensors.pack()?;
    T::unpack(&cast_float(packed, to)?, &shapes)
}

pub(super) fn cast_float(tensor: Tensor, to: Option<DType>) -> Result<Tensor> {
    match to {
        Some(to) if tensor.dtype().is_float() => tensor.to_dtype(to),
        _ => Ok(tensor),
    }
}

/// Stands in for a unit's module on a rank that contributes nothing.
pub(super) struct PassThrough;

impl Forward for PassThrough {
    fn forward(&self, input: &Tensor, _: &(), _: &Scope<'_>) -> Result<Tensor> {
        Ok(input.clone())
    }
}

/// What it takes to run a unit's module, now or again.
pub(super) struct Run<T, C, I, O> {
    pub module: Arc<T>,
    pub context: C,
    pub place: Place,
    pub weights_version: u64,
    pub boundary: std::marker::PhantomData<fn(I) -> O>,
}

/// A unit's inner graph.
pub(super) struct Graph {
    /// The variable that stands for the input; `None` if the input carries no gradient.
    input: Option<Tensor>,
    pub output: Tensor,
    borrowed: Vec<Param>,
}

pub(super) enum Saved {
    Graph(Graph),
    Inputs {
        input_shapes: Vec<Shape>,
        output: Shape,
        /// What the model's buffers held before the forward.
        buffers: BufferValues,
    },
}

impl<T, C, I, O> Run<T, C, I, O>
where
    T: Forward<C, I, O>,
    I: Tensors,
    O: Tensors,
{
    /// Runs the module, while its unit is `whole`.
    pub(super) fn forward(
        &self,
        _whole: &UnitGuard,
        input: &I,
        track: bool,
        name: &'static str,
    ) -> Result<(O, Vec<Param>)> {
        let Place { engine, unit, .. } = &self.place;
        let ctx = &engine.ctx;
        let span = ctx.begin_span(name, &ctx.unit(*unit).path);
        let frame = Frame::new(self.place.clone(), track);
        let output = self.module.forward(input, &self.context, &frame.scope());
        let output = output.map_err(|error| engine.note_unit_failure(*unit, None, error))?;
        if ctx.config.check_finite {
            self.check_finite(&output)?;
        }
        ctx.end_span(span);
        Ok((output, frame.borrowed.into_inner()))
    }

    /// The output, in memory of its own if it is a weight of the unit or a view of one: that memory is about to be taken back.
    pub(super) fn outlasting(&self, output: O) -> Result<O> {
        let (packed, shapes) = output.pack()?;
        let ctx = &self.place.engine.ctx;
        let mut weights =
            ctx.unit(self.place.unit).params.iter().map(|&param| ctx.params[param].variable.tensor());
        let packed = match weights.any(|weight| share_storage(weight, &packed)) {
            true if packed.elem_count() == 0 => packed.zeros_like()?,
            true => packed.force_contiguous()?,
            false => packed,
        };
        O::unpack(&packed, &shapes)
    }

    /// Runs the module on a detached input and keeps the graph; with the shapes of the output.
    pub(super) fn graph(
        &self,
        whole: &UnitGuard,
        packed: &Tensor,
        shapes: &[Shape],
        name: &'static str,
    ) -> Result<(Graph, Vec<Shape>)> {
        let tracked = packed.track_op();
        let leaf = if tracked { Var::from_tensor(&packed.detach())?.into_inner() } else { packed.detach() };
        let (output, borrowed) = self.forward(whole, &I::unpack(&leaf, shapes)?, true, name)?;
        let (output, output_shapes) = output.pack()?;
        Ok((Graph { input: tracked.then_some(leaf), output, borrowed }, output_shapes))
    }

    /// Runs the module again, on what it had the first time: the `buffers` as they were before. What it writes to buffers this time is dropped.
    fn recompute(
        &mut self,
        whole: &UnitGuard,
        packed: &Tensor,
        shapes: &[Shape],
        buffers: &BufferValues,
    ) -> Result<Graph> {
        let engine = &self.place.engine;
        let present = buffer_values(&engine.ctx, &mut engine.step())?;
        buffers.restore()?;
        self.place.recomputing = true;
        let graph = self.graph(whole, packed, shapes, "recompute");
        present.restore()?;
        Ok(graph?.0)
    }

    fn check_finite(&self, output: &O) -> Result<()> {
        let (packed, _) = output.pack()?;
        let sum = packed.detach().to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?;
        if sum.is_finite() {
            return Ok(());
        }
        let Place { engine, unit, .. } = &self.place;
        let phase = engine.step().phase();
        let error = engine.unit_error(*unit, phase, "its output holds a NaN or an infinity");
        Err(engine.note_failure(error))
    }
}

/// The op that stands for a unit in the outer graph. Arguments: the packed input, and the unit's anchor.
pub(super) struct Boundary<T, C, I, O> {
    /// The output, computed before the op is applied.
    pub value: Mutex<Option<Storage>>,
    pub shape: Shape,
    pub pass: Mutex<Option<BackwardPass<T, C, I, O>>>,
}

impl<T, C, I, O> Boundary<T, C, I, O> {
    /// Takes the output, as the storage that `of` finds in it.
    fn take<S>(&self, of: impl FnOnce(Storage) -> Option<S>) -> Result<(S, Shape)> {
        let Some(value) = self.value.lock().take() else {
            candle_core::bail!("a unit's output is taken once");
        };
        let place = value.device().location();
        match of(value) {
            Some(value) => Ok((value, self.shape.clone())),
            None => candle_core::bail!("a unit's output is on {place:?}, and its input on another device"),
        }
    }
}

pub(super) struct BackwardPass<T, C, I, O> {
    pub run: Run<T, C, I, O>,
    pub saved: Saved,
    pub expectation: Expectation,
}

impl<T, C, I, O> CustomOp2 for Boundary<T, C, I, O>
where
    T: Forward<C, I, O>,
    I: Tensors,
    O: Tensors,
{
    fn name(&self) -> &'static str {
        "fsdp-unit"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.take(|value| if let Storage::Cpu(value) = value { Some(value) } else { None })
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.take(|value| if let Storage::Cuda(value) = value { Some(value) } else { None })
    }

    fn bwd(
        &self,
        input: &Tensor,
        _anchor: &Tensor,
        _output: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let pass = {
            let mut pass = self.pass.lock();
            if let Some(BackwardPass { run, .. }) = &*pass {
                run.place.engine.check_opened(run.place.unit)?;
            }
            pass.take()
        };
        let Some(pass) = pass else {
            candle_core::bail!(
                "backward was run twice over the same forward: call the model's forward again"
            );
        };
        Ok((pass.backward(input, grad)?, None))
    }
}

impl<T, C, I, O> BackwardPass<T, C, I, O>
where
    T: Forward<C, I, O>,
    I: Tensors,
    O: Tensors,
{
    /// Unshard, (recompute,) inner backward, collect, reshard, reduce. Returns the gradient of the input, if
    /// it carries one.
    fn backward(self, input: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let BackwardPass { mut run, saved, expectation } = self;
        let (engine, unit) = (run.place.engine.clone(), run.place.unit);
        let fail = |error: crate::Error| engine.note_failure(error);
        let (guard, first_step) = engine.begin_unit_backward(unit, run.weights_version).map_err(fail)?;
        // Looked at in the first step only: it has the host wait.
        let alive = first_step && is_alive(grad)?;
        let graph = match saved {
            Saved::Graph(graph) => graph,
            Saved::Inputs { input_shapes, buffers, output } => {
                let graph = run.recompute(&guard, input, &input_shapes, &buffers)?;
                if graph.output.shape() != &output {
                    let message = format!(
                        "its forward gave {output:?}, and {:?} when it was recomputed: it must give the same each time",
                        graph.output.shape()
                    );
                    return Err(fail(engine.unit_error(unit, Phase::Backward, message)));
                }
                graph
            }
        };
        engine.open_gradients(unit, alive).map_err(fail)?;
        let span = engine.ctx.begin_span("backward", &engine.ctx.unit(unit).path);
        let inner = || {
            let mut grads = seed(&graph.output, grad)?.backward()?;
            gradients::collect(&engine, unit, &graph.borrowed, &mut grads)?;
            Ok(graph.input.as_ref().and_then(|leaf| grads.remove(leaf)).map(|grad| grad.detach()))
        };
        let input_grad = if graph.output.track_op() {
            inner().map_err(|error| engine.note_unit_failure(unit, Some(Phase::Backward), error))?
        } else {
            None
        };
        // candle expects a gradient for every tracked argument.
        let input_grad = match (&graph.input, input_grad) {
            (Some(leaf), None) => Some(leaf.zeros_like()?),
            (_, grad) => grad,
        };
        drop(graph);
        engine.ctx.end_span(span);
        engine.end_unit_backward(guard, expectation, &run.place.enclosing).map_err(fail)?;
        Ok(input_grad)
    }
}

/// A scalar whose backward hands `grad` to `output`: a vector-Jacobian product without the multiplication.
fn seed(output: &Tensor, grad: &Tensor) -> Result<Tensor> {
    output.apply_op1(Seed { grad: grad.clone() })
}

struct Seed {
    grad: Tensor,
}

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "fsdp-seed"
    }

    fn cpu_fwd(&self, _storage: &CpuStorage, _layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, _layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let scalar = Shape::from(());
        Ok((storage.device().zeros_impl(&scalar, DType::F32)?, scalar))
    }

    fn bwd(&self, _arg: &Tensor, _result: &Tensor, _grad: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.grad.clone()))
    }
}
