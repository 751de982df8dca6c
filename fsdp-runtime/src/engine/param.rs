//! A model's parameter: shape, dtype and initial value; its values live in the unit's flat buffer.

use std::sync::{Arc, OnceLock};

use candle_core::{Shape, Tensor};

use super::scope::Scope;
use super::sink::GradSink;
use crate::init::Init;
use crate::spec::Dtype;

/// A trainable (or frozen) tensor of a model.
///
/// Making one allocates nothing. Its values come to be when the model is sharded, each rank filling only its
/// own shard, and can be read only with a [`Scope`], that is, inside the forward of the unit that owns it. A
/// clone is the same parameter: a model that holds it twice has tied weights.
#[derive(Clone, Debug)]
pub struct Param(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    shape: Shape,
    init: Init,
    dtype: Option<Dtype>,
    bound: OnceLock<Bound>,
}

/// What `fully_shard` gives to a parameter.
#[derive(Debug)]
pub(crate) struct Bound {
    /// Identity of the engine of the sharded model.
    pub engine: usize,
    pub name: String,
    pub unit: usize,
    /// The permanent variable: an alias into the gathered buffer while unsharded, a tombstone while sharded.
    pub variable: Tensor,
    pub requires_grad: bool,
    pub sink: GradSink,
}

impl Param {
    /// A parameter of `shape`, initialised from a normal distribution of standard deviation 0.02.
    ///
    /// ```
    /// # use fsdp_runtime::{Init, Param};
    /// let weight = Param::new((64, 32));
    /// let bias = Param::new(64).with_init(Init::Zeros);
    /// assert_eq!(weight.dims(), [64, 32]);
    /// ```
    pub fn new(shape: impl Into<Shape>) -> Param {
        Param(Arc::new(Inner {
            shape: shape.into(),
            init: Init::Normal { mean: 0.0, std: 0.02 },
            dtype: None,
            bound: OnceLock::new(),
        }))
    }

    /// The same with another initial value.
    pub fn with_init(self, init: Init) -> Param {
        Param(Arc::new(Inner {
            shape: self.0.shape.clone(),
            init,
            dtype: self.0.dtype,
            bound: OnceLock::new(),
        }))
    }

    /// The same with a dtype of its own, whatever the policy says. An attribute on the field wins over it.
    pub fn with_dtype(self, dtype: Dtype) -> Param {
        Param(Arc::new(Inner {
            shape: self.0.shape.clone(),
            init: self.0.init.clone(),
            dtype: Some(dtype),
            bound: OnceLock::new(),
        }))
    }

    /// Dims, outermost first.
    pub fn dims(&self) -> &[usize] {
        self.0.shape.dims()
    }

    /// Shape as candle's type.
    pub fn shape(&self) -> &Shape {
        &self.0.shape
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.0.shape.elem_count()
    }

    /// Fully qualified name; `None` before the model is sharded.
    pub fn name(&self) -> Option<&str> {
        self.0.bound.get().map(|bound| bound.name.as_str())
    }

    /// Initial value.
    pub fn init(&self) -> &Init {
        &self.0.init
    }

    /// The parameter's values, whole, in the unit's compute dtype.
    ///
    /// The tensor is valid until the scope ends. A copy of the handle that is kept beyond it answers every op
    /// with an error once the unit is resharded.
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

    pub(crate) fn own_dtype(&self) -> Option<Dtype> {
        self.0.dtype
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
