//! Errors of configurations.

use std::path::PathBuf;

use fsdp::files::{FileError, said};

use crate::product::TooMany;
use crate::settings::SettingsError;

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not such a configuration.
    #[error("{}not a Llama configuration: {}", .path.as_ref().map_or(String::new(), |path| format!("`{}` is ", path.display())), said(.cause))]
    Malformed {
        /// The file, where there is one.
        path: Option<PathBuf>,
        /// What is wrong, and where.
        cause: serde_json::Error,
    },
    /// A size of zero.
    #[error("{field} is 0: it must be at least 1")]
    Zero {
        /// Which size.
        field: &'static str,
    },
    /// A size beyond that of any model, which could not be counted with.
    #[error("{field} is {size}: it must be at most {limit}")]
    TooLarge {
        /// Which size.
        field: &'static str,
        /// Its value.
        size: usize,
        /// The largest one.
        limit: usize,
    },
    /// More weights than any model has, of which the bytes could not be counted.
    #[error(transparent)]
    TooMany(#[from] TooMany),
    /// The heads do not fill the hidden size.
    #[error(
        "hidden_size {hidden} is not divisible by num_attention_heads {heads} (remainder {}) and no head_dim is given",
        .hidden % .heads
    )]
    HiddenNotDivisible {
        /// `hidden_size`.
        hidden: usize,
        /// `num_attention_heads`.
        heads: usize,
    },
    /// The query heads cannot be grouped evenly.
    #[error(
        "num_attention_heads {heads} is not divisible by num_key_value_heads {kv_heads} (remainder {})",
        .heads % .kv_heads
    )]
    HeadsNotDivisible {
        /// `num_attention_heads`.
        heads: usize,
        /// `num_key_value_heads`.
        kv_heads: usize,
    },
    /// Rotary embedding turns pairs of a head's dims.
    #[error("the head dim {head_dim} is odd: rotary embedding needs an even one")]
    OddHeadDim {
        /// Width of a head.
        head_dim: usize,
    },
    /// A constant that must be positive.
    #[error("{field} is {value}: it must be finite and positive")]
    NotPositive {
        /// Which constant.
        field: &'static str,
        /// Its value.
        value: f64,
    },
    /// A constant of the scaling of rotary frequencies.
    #[error("rope_scaling: {field} is {value}: expected {expected}")]
    RopeScaling {
        /// Which constant.
        field: &'static str,
        /// Its value.
        value: f64,
        /// What it may be.
        expected: &'static str,
    },
    /// A constant that may be 0, but not below.
    #[error("{field} is {value}: it must be finite and not negative")]
    Negative {
        /// Which constant.
        field: &'static str,
        /// Its value.
        value: f64,
    },
    /// A model of another architecture.
    #[error(
        "{}{field} is {value}: Llama models are read (model_type `llama`)",
        .path.as_ref().map_or(String::new(), |path| format!("`{}`: ", path.display()))
    )]
    OtherKind {
        /// The file, where there is one.
        path: Option<PathBuf>,
        /// The field that says so.
        field: &'static str,
        /// Its value.
        value: String,
    },
    /// Settings that would compute something else.
    #[error(transparent)]
    Settings(#[from] SettingsError),
}
