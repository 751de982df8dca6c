//! What a parameter *is*, before any memory exists: dtype, shape, group key, tensor-parallel dim.
//!
//! Plain data. Nothing here knows of devices or of candle.

mod names;
mod tensors;
mod tree;

use serde::Serialize;

pub use tensors::{FusedPart, LogicalTensor, TensorPiece};
pub use tree::{Attrs, Field, Tree};

/// Element type of a flat buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// bfloat16: the exponent of binary32, 8 bits of significand.
    BF16,
    /// IEEE binary16.
    F16,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::BF16 | Dtype::F16 => 2,
        }
    }

    /// The spelling used in attributes, options and reports: `f32`, `bf16`, `f16`.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::BF16 => "bf16",
            Dtype::F16 => "f16",
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Dtype {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "f32" => Ok(Dtype::F32),
            "bf16" => Ok(Dtype::BF16),
            "f16" => Ok(Dtype::F16),
            other => Err(format!("unknown dtype `{other}`: expected f32, bf16 or f16")),
        }
    }
}

/// How tensor parallelism cuts a parameter, as declared with `#[fsdp(tp = ..)]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum TpPlacement {
    /// The output features are cut: dim 0 of a `[out, in]` weight.
    Column,
    /// The input features are cut: dim 1 of a `[out, in]` weight.
    Row,
    /// Every tensor-parallel rank holds the whole parameter.
    Replicate,
    /// This dim is cut.
    Dim(usize),
}

impl TpPlacement {
    /// The dim that is cut; `None` if every rank holds the whole.
    pub const fn dim(self) -> Option<usize> {
        match self {
            TpPlacement::Column => Some(0),
            TpPlacement::Row => Some(1),
            TpPlacement::Dim(dim) => Some(dim),
            TpPlacement::Replicate => None,
        }
    }

    /// What a module's placement means for a parameter of `dims` dims inside it. A column- or row-parallel
    /// layer may hold parameters that lack the dim, the bias of a row-parallel one for instance: every rank
    /// holds those whole.
    pub(crate) const fn inherited(self, dims: usize) -> TpPlacement {
        match self {
            TpPlacement::Column if dims < 1 => TpPlacement::Replicate,
            TpPlacement::Row if dims < 2 => TpPlacement::Replicate,
            placement => placement,
        }
    }
}

impl std::fmt::Display for TpPlacement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            TpPlacement::Column => f.write_str("column"),
            TpPlacement::Row => f.write_str("row"),
            TpPlacement::Replicate => f.write_str("replicate"),
            TpPlacement::Dim(dim) => write!(f, "dim({dim})"),
        }
    }
}

/// Parameters with the same key share flat buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct GroupKey {
    /// Element type of the model weights.
    pub dtype: Dtype,
    /// Belongs to an expert, hence to the expert mesh.
    pub expert: bool,
    /// Trainable: has a gradient and optimizer state.
    pub requires_grad: bool,
    /// Index of the communication unit; 0 is the root, which owns what is in no `Unit`.
    pub unit: usize,
}

/// One physical parameter as the layout sees it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ParamSpec {
    /// Fully qualified name, renames applied. Checkpoints know it by this name unless it is fused: see
    /// [`ParamSpec::tensors`].
    pub name: String,
    /// Dims of the part that a tensor-parallel rank holds, outermost first; all of it where nothing is cut.
    pub shape: Vec<usize>,
    /// The flat buffers it belongs to.
    pub key: GroupKey,
    /// No weight decay is applied to it.
    pub no_decay: bool,
    /// Declared tensor-parallel placement, if any.
    pub tp: Option<TpPlacement>,
    /// Parts that tensor parallelism cuts it in, along [`ParamSpec::partition_dim`]; 1 where it is whole.
    pub tp_parts: usize,
    /// Used under more than one name (tied); it then has a bucket of its own in the root.
    pub shared: bool,
    /// The other names of a tied parameter, in declaration order.
    pub aliases: Vec<String>,
    /// The tensors that it is the concatenation of, along dim 0, if it is declared to be fused; else empty.
    pub fused: Vec<FusedPart>,
}

impl ParamSpec {
    /// Number of elements of the part that a tensor-parallel rank holds; the largest `usize` if there are more, which no
    /// layout takes.
    pub fn numel(&self) -> usize {
        self.shape.iter().fold(1, |numel: usize, dim| numel.saturating_mul(*dim))
    }

    /// The dim along which tensor parallelism cuts it, if it is declared to be cut.
    pub fn partition_dim(&self) -> Option<usize> {
        self.tp.and_then(TpPlacement::dim)
    }

    /// Every tensor-parallel rank holds the same elements: a norm over all ranks must count them once.
    pub fn is_replicated(&self) -> bool {
        self.partition_dim().is_none()
    }

    /// Dims of the whole parameter, outermost first.
    pub fn full_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Some(dim) = self.partition_dim() {
            shape[dim] *= self.tp_parts;
        }
        shape
    }
}

/// What becomes of a unit's whole weights between its forward and its backward, where the strategy shards
/// parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReshardAfterForward {
    /// Given up when another unit needs the memory; the backward gathers them again from all ranks. The last
    /// units of a forward, which the pool still holds, are not gathered again.
    #[default]
    Always,
    /// Kept until the backward: a unit of memory of its own for each such unit, and half the gathers.
    Never,
    /// Given up but for one part in so many, which a group of so many neighbouring ranks holds together: the
    /// backward gathers within that group. The number must divide that of the ranks that share the shards.
    Ranks(usize),
}

/// What the outer data-parallel ranks (`dp_outer`: replicas of the sharded model) share of the state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OuterStrategy {
    /// Nothing: each has what its inner rank has. Gradients are all-reduced once a step.
    #[default]
    NoShard,
    /// Each updates a part of its inner shard: optimizer state and main weights are cut among the outer ranks
    /// too. Gradients are reduce-scattered once a step, weights all-gathered once after it.
    Optim,
}

impl OuterStrategy {
    /// The spelling of the command line: `no-shard`, `optim`.
    pub const fn name(self) -> &'static str {
        match self {
            OuterStrategy::NoShard => "no-shard",
            OuterStrategy::Optim => "optim",
        }
    }
}

impl std::fmt::Display for OuterStrategy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Dtypes of a training run. Printing one says what each is.
///
/// What is not here is FP32 always: sums over ranks, each formed before it is rounded to where it is stored, and the
/// optimizer's state.
///
/// ```
/// use fsdp_runtime::MixedPrecision;
/// use fsdp_runtime::spec::Dtype;
///
/// let precision = MixedPrecision { output: Some(Dtype::F32), cast_inputs: true, ..MixedPrecision::BF16 };
/// assert_eq!(
///     precision.to_string(),
///     "weights bf16 on the wire and in compute, main weights f32, unreduced gradients f32, main gradients f32, \
///      inputs of units cast to their weights' dtype, outputs of units cast to f32"
/// );
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MixedPrecision {
    /// Dtype of the model weights, on the wire and in compute, where neither the parameter nor an attribute
    /// says otherwise.
    pub param: Dtype,
    /// Dtype in which unreduced gradients are held and travel. Ranks' sums are formed in FP32 whatever it is. What a rank
    /// holds back, under `no_sync` or of a unit that runs several times in one backward, it adds up in this dtype where
    /// gradients are sharded, as `reduce_dtype` of PyTorch's FSDP2 does ("dtype of no-sync gradient accumulation"): 16 bits
    /// lose small terms of long sums, and halve what is held. Keep it FP32, the default, or accumulate without `no_sync`, which
    /// reduces each microbatch into the main gradients. ZeRO-0 and 1 add up in the main gradients' dtype.
    pub reduce: Dtype,
    /// Keep FP32 main weights of 16-bit parameters, which the optimizer updates. Without them it updates the 16-bit
    /// weights: each step is rounded, which saves 4 bytes a parameter and loses small steps.
    pub main_weights: bool,
    /// Dtype in which reduced gradients are kept and accumulated over microbatches: FP32, or that of `reduce`.
    pub main_grads: Dtype,
    /// Cast what goes into a unit to the dtype of the unit's (first) weights. Integers are left alone, and so is a
    /// unit's context.
    pub cast_inputs: bool,
    /// Cast what comes out of a unit to this dtype; `None` leaves it as computed. With `cast_inputs`, activations
    /// between units can have more bits than those inside.
    pub output: Option<Dtype>,
}

impl Default for MixedPrecision {
    /// All FP32.
    fn default() -> Self {
        MixedPrecision::F32
    }
}

impl MixedPrecision {
    /// All FP32.
    pub const F32: MixedPrecision = MixedPrecision {
        param: Dtype::F32,
        reduce: Dtype::F32,
        main_weights: true,
        main_grads: Dtype::F32,
        cast_inputs: false,
        output: None,
    };

    /// bfloat16 weights, FP32 reduction, FP32 main weights and gradients.
    pub const BF16: MixedPrecision = MixedPrecision { param: Dtype::BF16, ..MixedPrecision::F32 };

    /// binary16 weights, FP32 reduction, FP32 main weights and gradients. To be trained with a
    /// [`LossScaler`](crate::optim::LossScaler).
    pub const F16: MixedPrecision = MixedPrecision { param: Dtype::F16, ..MixedPrecision::F32 };
}

impl std::fmt::Display for MixedPrecision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let MixedPrecision { param, reduce, main_weights, main_grads, cast_inputs, output } = self;
        let main = if *main_weights { "main weights f32" } else { "no main weights" };
        write!(f, "weights {param} on the wire and in compute, {main}, ")?;
        write!(f, "unreduced gradients {reduce}, main gradients {main_grads}, ")?;
        let inputs = if *cast_inputs { "cast to their weights' dtype" } else { "as they come" };
        write!(f, "inputs of units {inputs}, outputs of units ")?;
        match output {
            Some(output) => write!(f, "cast to {output}"),
            None => f.write_str("as computed"),
        }
    }
}

/// How much of the training state is sharded among the `dp_shard` ranks (ZeRO-0 to 3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// ZeRO-0: weights, gradients and optimizer state whole on each rank; gradients all-reduced.
    NoShard,
    /// ZeRO-1: optimizer state (and main weights) sharded.
    Optim,
    /// ZeRO-2: gradients too.
    OptimGrads,
    /// ZeRO-3: parameters too.
    #[default]
    OptimGradsParams,
}

impl Strategy {
    /// All of them, least sharded first.
    pub const ALL: [Strategy; 4] =
        [Strategy::NoShard, Strategy::Optim, Strategy::OptimGrads, Strategy::OptimGradsParams];

    /// The spelling of the command line: `no-shard`, `optim`, `optim-grads`, `optim-grads-params`.
    pub const fn name(self) -> &'static str {
        match self {
            Strategy::NoShard => "no-shard",
            Strategy::Optim => "optim",
            Strategy::OptimGrads => "optim-grads",
            Strategy::OptimGradsParams => "optim-grads-params",
        }
    }

    /// Model weights are held as shards between uses.
    pub const fn shards_params(self) -> bool {
        matches!(self, Strategy::OptimGradsParams)
    }

    /// Main gradients are held as shards.
    pub const fn shards_grads(self) -> bool {
        matches!(self, Strategy::OptimGrads | Strategy::OptimGradsParams)
    }

    /// Optimizer state is held as shards.
    pub const fn shards_optim(self) -> bool {
        !matches!(self, Strategy::NoShard)
    }
}

impl std::fmt::Display for Strategy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
