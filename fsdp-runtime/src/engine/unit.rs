//! `Unit<T>`: one communication unit, and the autograd boundary around it.
//!
//! The outer graph sees a unit as one op. Its forward runs the user's module on a detached input while the
//! unit is unsharded and keeps the inner graph (or, with recomputation, only the input). Its backward is
//! where the hooks live: unshard, run the inner backward seeded with the incoming gradient, collect the
//! parameters' gradients, reshard, reduce.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, DType, Layout, Result, Shape, Storage, Tensor, Var,
};
use parking_lot::Mutex;

use super::buffers::BufferValues;
use super::config::Recompute;
use super::core::{Engine, UnitGuard, WEIGHTS_CHANGED};
use super::forward::{Forward, Tensors};
use super::gradients::Expectation;
use super::module::{FsdpUnit, Walker};
use super::param::Param;
use super::scope::{Frame, Scope};
use crate::comm::Phase;
use crate::device::TensorDevice;
use crate::memory::copy_out;
use crate::random::RandomKey;
use crate::spec::{ReshardAfterForward, Tree};

/// The runtime's handle to a [`Unit`], filled in when the model is sharded.
#[derive(Debug, Default)]
pub struct UnitCell {
    bound: OnceLock<BoundUnit>,
    recompute: Option<Recompute>,
    reshard: Option<ReshardAfterForward>,
}

struct BoundUnit {
    engine: Arc<Engine>,
    unit: usize,
    recompute: Recompute,
    /// Makes the boundary op part of the graph even if the unit's input carries no gradient.
    anchor: Tensor,
}

impl std::fmt::Debug for BoundUnit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "unit {} `{}`", self.unit, self.engine.unit_name(self.unit))
    }
}

impl UnitCell {
    /// What the unit says of its weights between forward and backward.
    pub(crate) fn reshard(&self) -> Option<ReshardAfterForward> {
        self.reshard
    }

    /// What the unit says of recomputation.
    pub(crate) fn recompute(&self) -> Option<Recompute> {
        self.recompute
    }

    /// Ties the unit to its engine; false if it has one already.
    ///
    /// # Errors
    /// Those of the device.
    pub(crate) fn bind(&self, engine: &Arc<Engine>, unit: usize) -> Result<bool> {
        let anchor = Var::zeros(1, DType::F32, engine.backend.tensors())?.into_inner();
        let recompute = self.recompute.unwrap_or(engine.config.recompute);
        Ok(self.bound.set(BoundUnit { engine: engine.clone(), unit, recompute, anchor }).is_ok())
    }
}

/// A module whose parameters are gathered, used and given back together.
///
/// ```
/// # use fsdp_runtime::{Recompute, Unit};
/// let layers: Vec<Unit<()>> = (0..4).map(|_| Unit::new(()).recompute(Recompute::Unit)).collect();
/// # assert_eq!(layers.len(), 4);
/// ```
#[derive(Debug)]
pub struct Unit<T> {
    module: Arc<T>,
    cell: UnitCell,
}

impl<T> Unit<T> {
    /// Makes `module` a communication unit.
    pub fn new(module: T) -> Unit<T> {
        Unit { module: Arc::new(module), cell: UnitCell::default() }
    }

    /// The same with its own recomputation mode, whatever the configuration says.
    pub fn recompute(mut self, mode: Recompute) -> Unit<T> {
        self.cell.recompute = Some(mode);
        self
    }

    /// The same with its own answer to what becomes of its whole weights between forward and backward, whatever
    /// the configuration says.
    pub fn reshard_after_forward(mut self, mode: ReshardAfterForward) -> Unit<T> {
        self.cell.reshard = Some(mode);
        self
    }

    /// The module, to be changed before the model is sharded; `None` afterwards, as a layout was made for what
    /// it was.
    ///
    /// ```
    /// # use fsdp_runtime::{FullyShard, Param, Unit, comm::DeviceMesh};
    /// let mut layer = Unit::new(vec![Param::new(4)]);
    /// layer.module_mut().expect("not sharded").push(Param::new(2));
    /// let model = layer.fully_shard(&DeviceMesh::single())?;
    /// assert_eq!(model.layout().params.len(), 2);
    /// # Ok::<(), fsdp_runtime::Error>(())
    /// ```
    pub fn module_mut(&mut self) -> Option<&mut T> {
        if self.cell.bound.get().is_some() { None } else { Arc::get_mut(&mut self.module) }
    }
}

impl<T> Deref for Unit<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.module
    }
}

impl<T> From<T> for Unit<T> {
    fn from(module: T) -> Self {
        Unit::new(module)
    }
}

impl<T: FsdpUnit> FsdpUnit for Unit<T> {
    const TREE: Tree = Tree::Unit(&T::TREE);

    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        walker.unit(&self.cell, |walker| self.module.walk(walker));
    }
}

impl<T> Unit<T> {
    /// Unshards the unit, runs its module's forward, reshards it; in training, arranges for its backward.
    ///
    /// `context` is kept for recomputation, hence `Clone`; it carries no gradient. Every rank must call it,
    /// in the same order among the units.
    ///
    /// # Errors
    /// Those of the module, of the gather, and of a unit that is in no sharded model.
    pub fn forward<C, I, O>(&self, input: &I, context: &C, scope: &Scope<'_>) -> Result<O>
    where
        T: Forward<C, I, O> + Send + Sync + 'static,
        C: Clone + Send + Sync + 'static,
        I: Tensors + 'static,
        O: Tensors + 'static,
    {
        self.run(self.module.clone(), input, context, scope)
    }

    /// Takes part in the unit's collectives without running it, for a rank that has nothing for the unit to do
    /// while others have: an expert that no token of this rank was routed to, for instance. Returns `input` as it
    /// is; in the backward the rank contributes zeros to the unit's gradients.
    ///
    /// Each rank must call either this or [`Unit::forward`], at the same place among the units, and the loss must
    /// depend on what it returns (multiplied by zero, candle would leave it out of the backward).
    ///
    /// # Errors
    /// As for [`Unit::forward`].
    pub fn contribute_zero(&self, input: &Tensor, scope: &Scope<'_>) -> Result<Tensor> {
        self.run(Arc::new(PassThrough), input, &(), scope)
    }

    fn run<N, C, I, O>(&self, module: Arc<N>, input: &I, context: &C, scope: &Scope<'_>) -> Result<O>
    where
        N: Forward<C, I, O> + Send + Sync + 'static,
        C: Clone + Send + Sync + 'static,
        I: Tensors + 'static,
        O: Tensors + 'static,
    {
        let outer = scope.frame();
        let Some(bound) = self.cell.bound.get().filter(|bound| bound.engine.id() == outer.engine.id()) else {
            candle_core::bail!(
                "a `Unit` inside `{}` is in no sharded model: it was not there (or its field is marked skip) when \
                 `fully_shard` walked the model",
                outer.engine.unit_name(outer.unit)
            );
        };
        let mut enclosing = outer.enclosing.clone();
        enclosing.push(outer.unit);
        let run = Run {
            module,
            context: context.clone(),
            engine: bound.engine.clone(),
            unit: bound.unit,
            weights_version: bound.engine.weights_version(),
            enclosing,
            training: outer.training,
            recomputing: outer.recomputing,
            random: outer.next_random(),
            _boundary: std::marker::PhantomData::<fn(I) -> O>,
        };
        let guard =
            run.engine.enter(run.unit, Phase::Forward).map_err(|error| run.engine.note_failure(error))?;
        let casts = bound.engine.casts(bound.unit);
        if !outer.track {
            // Evaluation, or a unit inside one that keeps no graph in its forward.
            let (output, _) = match casts.input {
                None => run.forward(&guard, input, false, "forward")?,
                to => run.forward(&guard, &cast_floats(input, to)?, false, "forward")?,
            };
            guard.leave().map_err(|error| run.engine.note_failure(error))?;
            return if casts.output.is_none() { Ok(output) } else { cast_floats(&output, casts.output) };
        }
        let (packed, shapes) = input.pack()?;
        let packed = cast_float(packed, casts.input)?;
        let (saved, value) = match bound.recompute {
            Recompute::None => {
                let inner = run.graph(&guard, &packed, &shapes, "forward")?;
                let value = copy_out(&inner.output)?;
                (Saved::Graph(inner), value)
            }
            Recompute::Unit => {
                let buffers = run.engine.buffer_values()?;
                let (output, _) =
                    run.forward(&guard, &I::unpack(&packed.detach(), &shapes)?, false, "forward")?;
                let (output, output_shapes) = output.pack()?;
                let value = copy_out(&output)?;
                let shape = output.shape().clone();
                (Saved::Inputs { input_shapes: shapes, output_shapes, shape, buffers }, value)
            }
        };
        let expectation = bound.engine.expect_backward(&guard);
        guard.leave().map_err(|error| bound.engine.note_failure(error))?;
        let (shape, output_shapes) = match &saved {
            Saved::Graph(inner) => (inner.output.shape().clone(), inner.output_shapes.clone()),
            Saved::Inputs { shape, output_shapes, .. } => (shape.clone(), output_shapes.clone()),
        };
        let boundary = Boundary {
            value: Mutex::new(Some(value)),
            shape,
            pass: Mutex::new(Some(BackwardPass { run, saved, expectation })),
        };
        let output = packed.apply_op2(&bound.anchor, boundary)?;
        O::unpack(&cast_float(output, casts.output)?, &output_shapes)
    }
}

/// Dtypes that floating-point tensors are cast to at a unit's boundary.
#[derive(Clone, Copy)]
pub(crate) struct Casts {
    pub input: Option<DType>,
    pub output: Option<DType>,
}

fn cast_floats<T: Tensors>(tensors: &T, to: Option<DType>) -> Result<T> {
    let (packed, shapes) = tensors.pack()?;
    T::unpack(&cast_float(packed, to)?, &shapes)
}

fn cast_float(tensor: Tensor, to: Option<DType>) -> Result<Tensor> {
    match to {
        Some(to) if tensor.dtype().is_float() => tensor.to_dtype(to),
        _ => Ok(tensor),
    }
}

/// Stands in for a unit's module on a rank that contributes nothing.
struct PassThrough;

impl Forward for PassThrough {
    fn forward(&self, input: &Tensor, _: &(), _: &Scope<'_>) -> Result<Tensor> {
        Ok(input.clone())
    }
}

/// What it takes to run a unit's module, now or again.
struct Run<T, C, I, O> {
    module: Arc<T>,
    context: C,
    engine: Arc<Engine>,
    unit: usize,
    weights_version: u64,
    enclosing: Vec<usize>,
    training: bool,
    recomputing: bool,
    random: RandomKey,
    _boundary: std::marker::PhantomData<fn(I) -> O>,
}

/// A unit's inner graph.
struct Graph {
    /// The variable that stands for the input; `None` if the input carries no gradient.
    input: Option<Tensor>,
    output: Tensor,
    output_shapes: Vec<Shape>,
    borrowed: Vec<Param>,
}

enum Saved {
    Graph(Graph),
    Inputs {
        input_shapes: Vec<Shape>,
        output_shapes: Vec<Shape>,
        shape: Shape,
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
    fn forward(
        &self,
        _whole: &UnitGuard,
        input: &I,
        track: bool,
        name: &'static str,
    ) -> Result<(O, Vec<Param>)> {
        let span = self.engine.begin_span(name, &self.engine.units[self.unit].path);
        let frame = Frame {
            engine: self.engine.clone(),
            unit: self.unit,
            enclosing: self.enclosing.clone(),
            track,
            training: self.training,
            recomputing: self.recomputing,
            random: self.random,
            draws: Default::default(),
            borrowed: Default::default(),
        };
        let output = self
            .module
            .forward(input, &self.context, &frame.scope())
            .map_err(|error| self.engine.note_unit_failure(self.unit, self.engine.phase(), error))?;
        if self.engine.config.check_finite {
            self.check_finite(&output)?;
        }
        self.engine.end_span(span);
        Ok((output, frame.borrowed.into_inner()))
    }

    /// Runs the module on a detached input and keeps the graph.
    fn graph(
        &self,
        whole: &UnitGuard,
        packed: &Tensor,
        shapes: &[Shape],
        name: &'static str,
    ) -> Result<Graph> {
        let tracked = packed.track_op();
        let leaf = if tracked { Var::from_tensor(&packed.detach())?.into_inner() } else { packed.detach() };
        let (output, borrowed) = self.forward(whole, &I::unpack(&leaf, shapes)?, true, name)?;
        let (output, output_shapes) = output.pack()?;
        Ok(Graph { input: tracked.then_some(leaf), output, output_shapes, borrowed })
    }

    /// Runs the module again, on what it had the first time: the `buffers` as they were before. What it writes to buffers this time is dropped.
    fn recompute(
        &mut self,
        whole: &UnitGuard,
        packed: &Tensor,
        shapes: &[Shape],
        buffers: &BufferValues,
    ) -> Result<Graph> {
        let present = self.engine.buffer_values()?;
        buffers.restore()?;
        self.recomputing = true;
        let graph = self.graph(whole, packed, shapes, "recompute");
        present.restore()?;
        graph
    }

    fn check_finite(&self, output: &O) -> Result<()> {
        let (packed, _) = output.pack()?;
        let sum = packed.detach().to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?;
        if sum.is_finite() {
            return Ok(());
        }
        let error =
            self.engine.unit_error(self.unit, self.engine.phase(), "its output holds a NaN or an infinity");
        Err(self.engine.note_failure(error))
    }
}

/// The op that stands for a unit in the outer graph. Arguments: the packed input, and the unit's anchor.
struct Boundary<T, C, I, O> {
    /// The output, computed before the op is applied.
    value: Mutex<Option<Storage>>,
    shape: Shape,
    pass: Mutex<Option<BackwardPass<T, C, I, O>>>,
}

impl<T, C, I, O> Boundary<T, C, I, O> {
    fn take_value(&self) -> Result<Storage> {
        let Some(value) = self.value.lock().take() else {
            candle_core::bail!("a unit's output is taken once");
        };
        Ok(value)
    }
}

fn apart(output: &Storage) -> candle_core::Error {
    candle_core::Error::Msg(format!(
        "a unit's output is on {:?}, and its input on another device",
        output.device()
    ))
}

struct BackwardPass<T, C, I, O> {
    run: Run<T, C, I, O>,
    saved: Saved,
    expectation: Expectation,
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

    fn cpu_fwd(
        &self,
        _input: &CpuStorage,
        _input_layout: &Layout,
        _anchor: &CpuStorage,
        _anchor_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        match self.take_value()? {
            Storage::Cpu(value) => Ok((value, self.shape.clone())),
            other => Err(apart(&other)),
        }
    }

    fn cuda_fwd(
        &self,
        _input: &CudaStorage,
        _input_layout: &Layout,
        _anchor: &CudaStorage,
        _anchor_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        match self.take_value()? {
            Storage::Cuda(value) => Ok((value, self.shape.clone())),
            other => Err(apart(&other)),
        }
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
                run.engine.note_reached(run.unit)?;
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
        let engine = run.engine.clone();
        let fail = |error: crate::Error| engine.note_failure(error);
        if engine.weights_version() != run.weights_version {
            return Err(fail(engine.unit_error(run.unit, Phase::Backward, WEIGHTS_CHANGED)));
        }
        engine.note_incoming(run.unit, grad)?;
        let guard = engine.enter(run.unit, Phase::Backward).map_err(fail)?;
        let graph = match saved {
            Saved::Graph(graph) => graph,
            Saved::Inputs { input_shapes, buffers, shape, .. } => {
                let graph = run.recompute(&guard, input, &input_shapes, &buffers)?;
                if graph.output.shape() != &shape {
                    let message = format!(
                        "its forward gave {shape:?}, and {:?} when it was recomputed: it must give the same each time",
                        graph.output.shape()
                    );
                    return Err(fail(engine.unit_error(run.unit, Phase::Backward, message)));
                }
                graph
            }
        };
        engine.open_gradients(run.unit).map_err(fail)?;
        let span = engine.begin_span("backward", &engine.units[run.unit].path);
        let inner = || {
            let mut grads = seed(&graph.output, grad)?.backward()?;
            engine.collect_gradients(run.unit, &graph.borrowed, &mut grads)?;
            Ok(graph.input.as_ref().and_then(|leaf| grads.remove(leaf)).map(|grad| grad.detach()))
        };
        let input_grad = if graph.output.track_op() {
            inner().map_err(|error| engine.note_unit_failure(run.unit, Phase::Backward, error))?
        } else {
            None
        };
        // candle expects a gradient for every tracked argument.
        let input_grad = match (&graph.input, input_grad) {
            (Some(leaf), None) => Some(leaf.zeros_like()?),
            (_, grad) => grad,
        };
        drop(graph);
        engine.end_span(span);
        guard.leave().map_err(fail)?;
        expectation.meet(&run.enclosing).map_err(|error| fail(error.into()))?;
        if engine.config.reshard_after_backward {
            engine.reshard_after_backward(run.unit).map_err(|error| fail(error.into()))?;
        }
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
