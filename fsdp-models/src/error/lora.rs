//! Errors of adapters.

use std::path::PathBuf;

use fsdp::files::{FileError, TensorFileError, brief, brief_to, listed, said};

use super::PathError;
use crate::settings::SettingsError;

/// The projections of a block.
pub const PROJECTIONS: [&str; 7] =
    ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// Largest rank, with which products of sizes can still be counted.
pub(crate) const MAX_RANK: usize = 1 << 24;

/// Why there are no adapters, or none can be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoraError {
    /// A rank of 0.
    #[error("the rank of the adapters is 0: it must be at least 1")]
    NoRank,
    /// A rank beyond that of any matrix, which could not be counted with.
    #[error("the rank of the adapters is {rank}: it must be at most {MAX_RANK}")]
    Rank {
        /// The value.
        rank: usize,
    },
    /// A scale that means nothing.
    #[error("alpha is {alpha}: it must be finite and positive")]
    Alpha {
        /// The value.
        alpha: f64,
    },
    /// A probability out of range.
    #[error("the dropout of the adapters is {dropout}: it must be at least 0 and below 1")]
    Dropout {
        /// The value.
        dropout: f64,
    },
    /// Nothing to adapt.
    #[error("no projection is named: expected {}, or all-linear", PROJECTIONS.join(", "))]
    NoTargets,
    /// Names that are no projections.
    #[error(
        "{} no projection of the model: expected some of {}{}, or all-linear",
        are(.unknown), PROJECTIONS.join(", "), if *.head { ", lm_head" } else { "" }
    )]
    UnknownTargets {
        /// The names.
        unknown: Vec<String>,
        /// The model has a head that is not the embedding.
        head: bool,
    },
    /// A pattern that is none, or that no projection has.
    #[error("the pattern `{}` of the adapted modules {}", brief_to(.pattern, 200), said(.reason))]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Adapters are added once.
    #[error("the model has adapters already")]
    Adapted,
    /// Too late.
    #[error("the model is sharded already: adapters must be added before `fully_shard`")]
    Sharded,
    /// Nothing to save.
    #[error("the model has no adapters")]
    NotAdapted,
    /// A directory that is no adapter of PEFT, or one of a kind that is not implemented.
    #[error("`{}`: {}", .path.display(), said(.reason))]
    Peft {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A place to write to.
    #[error(transparent)]
    Path(#[from] PathError),
    /// Settings of an adapter of another kind.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// A file that cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The adapters' tensors.
    #[error(transparent)]
    Tensors(#[from] TensorFileError),
    /// The sharded model.
    #[error(transparent)]
    Fsdp(#[from] fsdp::Error),
}

fn are(names: &[String]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{}`", brief(name))).collect();
    format!("{} {}", listed(&quoted), if names.len() == 1 { "is" } else { "are" })
}
