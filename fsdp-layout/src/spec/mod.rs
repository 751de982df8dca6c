//! Describes parameters before any memory exists: dtype, shape, group key, tensor-parallel dim.
//!
//! Plain data. Nothing here knows of devices or of candle.

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
    pub const fn inherited(self, dims: usize) -> TpPlacement {
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
