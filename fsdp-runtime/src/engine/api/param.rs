//! A model's parameter: shape, dtype and initial value; its values live in the unit's flat buffer.

use std::sync::{Arc, OnceLock};

use candle_core::{Shape, Tensor};
use parking_lot::Mutex;

use crate::engine::{GradSink, ParamId, Scope, UnitId};
use crate::error::{Error, Result};
use crate::init::Init;
use crate::spec::Dtype;

/// A trainable (or frozen) tensor of a model.
///
/// Making one allocates nothing. Its values come to be when the model is sharded, each rank filling only its
/// own shard, and can be read only with a [`Scope`], that is, inside the forward of the unit that owns it. A
/// clone is the same parameter: a model that holds it twice has tied weights.
#[derive(Clone, Debug)]
#[must_use]
pub struct Param(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    made: Made,
    /// Set at run time, whatever the attributes say.
    requires_grad: Mutex<Option<bool>>,
    bound: OnceLock<Bound>,
}

/// What a parameter was made with.
#[derive(Clone, Debug)]
struct Made {
    shape: Shape,
    init: Init,
    dtype: Option<Dtype>,
    fused_rows: Option<Vec<usize>>,
}

/// What `fully_shard` gives to a parameter.
#[derive(Debug)]
pub(crate) struct Bound {
    /// Identity of the engine of the sharded model.
    pub engine: usize,
    pub name: String,
    pub unit: UnitId,
    pub param: ParamId,
    /// The parameter's one tensor: it has the gathered values while unsharded, a tombstone while sharded. Tied parameters
    /// have the same.
    pub variable: Tensor,
    pub requires_grad: bool,
    pub sink: GradSink,
}

impl Param {
    /// A parameter of `shape` (of the whole, however many ranks share it), initialised from a normal distribution of standard deviation 0.02.
    ///
    /// ```
    /// # use fsdp_runtime::{Init, Param};
    /// let weight = Param::new((64, 32));
    /// let bias = Param::new(64).with_init(Init::Zeros);
    /// assert_eq!(weight.dims(), [64, 32]);
    /// ```
    pub fn new(shape: impl Into<Shape>) -> Param {
        let init = Init::Normal { mean: 0.0, std: 0.02 };
        Param::unbound(Made { shape: shape.into(), init, dtype: None, fused_rows: None }, None)
    }

    /// The same with another initial value. An attribute on the field wins over it.
    pub fn with_init(self, init: Init) -> Param {
        self.remade(|made| made.init = init)
    }

    /// The same with a dtype of its own, whatever the policy says. An attribute on the field wins over it.
    pub fn with_dtype(self, dtype: Dtype) -> Param {
        self.remade(|made| made.dtype = Some(dtype))
    }

    /// The same with so many rows (size along dim 0) in each of the parts that `#[fsdp(fused(..))]` names, in their
    /// order; without it they have all the same. `fully_shard` refuses a number of parts that is not that of the
    /// names, and rows whose sum is not dim 0.
    ///
    /// ```
    /// # use fsdp_runtime::Param;
    /// let (hidden, q, kv) = (64, 64, 16);
    /// let qkv = Param::new((q + 2 * kv, hidden)).with_fused_rows([q, kv, kv]);
    /// assert_eq!(qkv.fused_rows(), Some(&[64, 16, 16][..]));
    /// ```
    pub fn with_fused_rows(self, rows: impl Into<Vec<usize>>) -> Param {
        self.remade(|made| made.fused_rows = Some(rows.into()))
    }

    fn remade(self, change: impl FnOnce(&mut Made)) -> Param {
        let mut made = self.0.made.clone();
        change(&mut made);
        Param::unbound(made, self.own_requires_grad())
    }

    fn unbound(made: Made, requires_grad: Option<bool>) -> Param {
        Param(Arc::new(Inner { made, requires_grad: Mutex::new(requires_grad), bound: OnceLock::new() }))
    }

    /// Freezes the parameter (`false`) or makes it trainable, whatever the attributes say; for a whole module
    /// see [`FullyShard::set_requires_grad`](crate::engine::FullyShard::set_requires_grad). Clones follow.
    ///
    /// # Errors
    /// If the model is sharded already: its layout is made for what was trainable then.
    pub fn set_requires_grad(&self, requires_grad: bool) -> Result<()> {
        if let Some(name) = self.name() {
            return Err(Error::Param {
                param: name.into(),
                message: "is sharded already: what is trainable must be said before `fully_shard`".into(),
            });
        }
        *self.0.requires_grad.lock() = Some(requires_grad);
        Ok(())
    }

    /// Dims, outermost first.
    pub fn dims(&self) -> &[usize] {
        self.0.made.shape.dims()
    }

    /// Shape as candle's type.
    pub fn shape(&self) -> &Shape {
        &self.0.made.shape
    }

    /// Number of elements; the largest `usize` if there are more, which no mesh takes.
    pub fn numel(&self) -> usize {
        self.dims().iter().fold(1, |numel: usize, dim| numel.saturating_mul(*dim))
    }

    /// Fully qualified name; `None` before the model is sharded.
    pub fn name(&self) -> Option<&str> {
        self.0.bound.get().map(|bound| bound.name.as_str())
    }

    /// Initial value.
    pub fn init(&self) -> &Init {
        &self.0.made.init
    }

    /// Rows of each part, as given by [`Param::with_fused_rows`].
    pub fn fused_rows(&self) -> Option<&[usize]> {
        self.0.made.fused_rows.as_deref()
    }

    /// The parameter's values, whole, in the unit's compute dtype.
    ///
    /// The tensor is valid until the scope ends. A copy of the handle that is kept beyond it answers every op
    /// with an error once the unit is resharded: one of candle's that names the dtype `F4`, which nothing else has. Made one
    /// of the runtime's, by `?` in a function that returns its [`Result`] or by `Error::from`, it says which
    /// parameters are resharded and what to do ([`Error::Resharded`]).
    /// It is to be read only: an in-place op on it, or a guard of its storage that outlives the scope, is an error of the
    /// forward or the backward that it is done in, and of all that comes later until the weights are loaded, or the guard is
    /// dropped and [`reset_step`](crate::engine::Fsdp::reset_step) called.
    ///
    /// # Errors
    /// If the parameter belongs to another unit than the one `scope` is for (or one that encloses it), naming
    /// both.
    pub fn tensor(&self, scope: &Scope<'_>) -> candle_core::Result<Tensor> {
        scope.read(self)
    }

    /// Where ops that compute weight gradients themselves may write this parameter's.
    pub fn grad_sink(&self) -> GradSink {
        self.0.bound.get().map(|bound| bound.sink.clone()).unwrap_or_default()
    }

    pub(crate) fn own_requires_grad(&self) -> Option<bool> {
        *self.0.requires_grad.lock()
    }

    pub(crate) fn own_dtype(&self) -> Option<Dtype> {
        self.0.made.dtype
    }

    pub(crate) fn bound(&self) -> Option<&Bound> {
        self.0.bound.get()
    }

    /// Ties the parameter to its place; false if it has one already.
    pub(crate) fn bind(&self, bound: Bound) -> bool {
        self.0.bound.set(bound).is_ok()
    }

    /// Identity: equal for clones.
    pub(crate) fn id(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }
}
