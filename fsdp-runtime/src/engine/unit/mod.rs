//! `Unit<T>`: one communication unit, as the user's module has it. What is around it are its parts: the autograd op that stands
//! for it ([`boundary`]), its weights in tensors ([`weights`]), and its gradients ([`gradients`]).

mod boundary;
pub(crate) mod gradients;
pub(crate) mod opened;
pub(crate) mod resharded;
pub(crate) mod root_parts;
pub(crate) mod weights;

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use candle_core::{DType, Result, Tensor, Var};
use parking_lot::Mutex;

use self::boundary::{BackwardPass, Boundary, PassThrough, Run, Saved, cast_float, cast_floats};
use crate::comm::Phase;
use crate::device::TensorDevice;
use crate::engine::api::scope::Place;
use crate::engine::io::buffers::buffer_values;
use crate::engine::{Engine, Forward, FsdpUnit, Id, Recompute, Scope, Tensors, UnitId, Walker};
use crate::memory::copy_out;
use crate::spec::{ReshardAfterForward, Tree};

/// The runtime's handle to a [`Unit`], filled in when the model is sharded.
#[derive(Debug, Default)]
pub struct UnitCell {
    bound: OnceLock<BoundUnit>,
    /// What the unit says of recomputation.
    pub(crate) recompute: Option<Recompute>,
    /// What the unit says of its weights between forward and backward.
    pub(crate) reshard: Option<ReshardAfterForward>,
}

struct BoundUnit {
    engine: Arc<Engine>,
    unit: UnitId,
    recompute: Recompute,
    /// Makes the boundary op part of the graph even if the unit's input carries no gradient.
    anchor: Tensor,
}

impl std::fmt::Debug for BoundUnit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "unit {} `{}`", self.unit.index(), self.engine.ctx.unit_name(self.unit))
    }
}

impl UnitCell {
    /// Ties the unit to its engine; false if it has one already.
    pub(crate) fn bind(&self, engine: &Arc<Engine>, unit: UnitId) -> Result<bool> {
        let anchor = Var::zeros(1, DType::F32, engine.ctx.backend.tensors())?.into_inner();
        let recompute = self.recompute.unwrap_or(engine.ctx.config.recompute);
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
#[must_use]
pub struct Unit<T> {
    module: Arc<T>,
    cell: UnitCell,
}

impl<T> Unit<T> {
    /// Makes `module` a communication unit.
    pub fn new(module: T) -> Unit<T> {
        Unit { module: Arc::new(module), cell: UnitCell::default() }
    }

    /// Sets whether this unit is recomputed in the backward, whatever the configuration says.
    pub fn recompute(mut self, mode: Recompute) -> Unit<T> {
        self.cell.recompute = Some(mode);
        self
    }

    /// Sets whether this unit's weights stay whole between its forward and its backward, whatever the configuration says.
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
        let Place { engine, unit: around, enclosing, training, recomputing, .. } = &outer.place;
        let Some(bound) = self.cell.bound.get().filter(|bound| bound.engine.id() == engine.id()) else {
            candle_core::bail!(
                "a `Unit` inside `{}` is in no sharded model: it was not there (or its field is marked skip) when \
                 `fully_shard` walked the model",
                engine.ctx.unit_name(*around)
            );
        };
        let place = Place {
            engine: engine.clone(),
            unit: bound.unit,
            enclosing: [enclosing.as_slice(), &[*around]].concat(),
            training: *training,
            recomputing: *recomputing,
            random: outer.next_random(),
        };
        let guard = engine.enter(bound.unit, Phase::Forward).map_err(|error| engine.note_failure(error))?;
        let run = Run {
            module,
            context: context.clone(),
            place,
            weights_version: guard.weights_version,
            boundary: std::marker::PhantomData::<fn(I) -> O>,
        };
        let casts = engine.ctx.casts(bound.unit);
        if !outer.track {
            // Evaluation, or a unit inside one that keeps no graph in its forward.
            let (output, _) = match casts.input {
                None => run.forward(&guard, input, false, "forward")?,
                to => run.forward(&guard, &cast_floats(input, to)?, false, "forward")?,
            };
            let output = run.outlasting(output)?;
            guard.leave().map_err(|error| engine.note_failure(error))?;
            return if casts.output.is_none() { Ok(output) } else { cast_floats(&output, casts.output) };
        }
        let (packed, shapes) = input.pack()?;
        let packed = cast_float(packed, casts.input)?;
        let (saved, output, output_shapes) = match bound.recompute {
            Recompute::None => {
                let (graph, output_shapes) = run.graph(&guard, &packed, &shapes, "forward")?;
                let output = graph.output.clone();
                (Saved::Graph(graph), output, output_shapes)
            }
            Recompute::Unit => {
                let buffers = buffer_values(&engine.ctx, &mut engine.step())?;
                // As in the graph that the backward makes, whose leaf is contiguous: strides decide how candle computes.
                let leaf = packed.detach();
                let leaf = if packed.track_op() { leaf.contiguous()? } else { leaf };
                let (output, _) = run.forward(&guard, &I::unpack(&leaf, &shapes)?, false, "forward")?;
                let (output, output_shapes) = output.pack()?;
                let saved = Saved::Inputs { input_shapes: shapes, output: output.shape().clone(), buffers };
                (saved, output, output_shapes)
            }
        };
        let (value, shape) = (copy_out(&output)?, output.shape().clone());
        drop(output);
        let expectation = engine.end_unit_forward(guard).map_err(|error| engine.note_failure(error))?;
        let boundary = Boundary {
            value: Mutex::new(Some(value)),
            shape,
            pass: Mutex::new(Some(BackwardPass { run, saved, expectation })),
        };
        let output = packed.apply_op2(&bound.anchor, boundary)?;
        O::unpack(&cast_float(output, casts.output)?, &output_shapes)
    }
}
