//! The error of the runtime. Messages say where something went wrong, and what to do.

mod checkpoint;

use std::sync::Arc;

pub use checkpoint::CheckpointError;

use crate::comm::{CommError, Phase, step_words};
use crate::layout::LayoutError;
use crate::mesh::MeshError;
use crate::optim::OptimError;

/// An error of the runtime. Cheap to clone.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A collective failed: ranks diverged, a rank failed, or time ran out.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// candle refused an operation.
    #[error(transparent)]
    Tensor(Arc<candle_core::Error>),
    /// candle refused an operation on a parameter that is resharded. Its own error names no more than a dtype, `F4`.
    #[error("{error}. {advice}")]
    Resharded {
        /// candle's error.
        error: Arc<candle_core::Error>,
        /// Which parameters it may be, and what to do.
        advice: String,
    },
    /// The parameters cannot be laid out.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The optimizer's settings are out of range.
    #[error(transparent)]
    Optim(#[from] OptimError),
    /// The ranks cannot be arranged as asked.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// A CUDA device cannot be used.
    #[error(transparent)]
    Cuda(#[from] fsdp_comm::device::cuda::CudaError),
    /// The configuration contradicts itself, the mesh or the model.
    #[error("configuration: {0}")]
    Config(String),
    /// A parameter is declared or used wrongly.
    #[error("parameter `{param}`: {message}")]
    Param {
        /// Fully qualified name.
        param: String,
        /// What was expected and what came.
        message: String,
    },
    /// Something failed inside a unit.
    #[error("rank {rank}, unit `{unit}`, {phase}, {}: {message}", step_words(*.step))]
    Unit {
        /// This rank.
        rank: usize,
        /// Path of the unit; `(root)` for the root.
        unit: String,
        /// Part of the step.
        phase: Phase,
        /// Optimizer step, from 0. The message counts from 1.
        step: u64,
        /// What happened.
        message: String,
    },
    /// The ranks do not have the same model, configuration or optimizer.
    #[error("the ranks differ: rank {rank} has {ours}; rank {other} has {theirs}")]
    RanksDiffer {
        /// The rank that reports.
        rank: usize,
        /// What it has.
        ours: String,
        /// A rank that has something else.
        other: usize,
        /// What that one has.
        theirs: String,
    },
    /// A rank failed in what all ranks do together; see [`Fsdp::agree_on`](crate::Fsdp::agree_on).
    #[error("{message}")]
    OnRank {
        /// The first rank that failed.
        failed: usize,
        /// Its error.
        message: String,
    },
    /// A checkpoint cannot be written or read.
    #[error(transparent)]
    Checkpoint(Arc<CheckpointError>),
    /// A call that makes no sense in the present state.
    #[error("{0}")]
    Usage(String),
}

/// Result of the runtime's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<fsdp_comm::Error> for Error {
    fn from(error: fsdp_comm::Error) -> Self {
        match error {
            fsdp_comm::Error::Comm(error) => Error::Comm(error),
            fsdp_comm::Error::Mesh(error) => Error::Mesh(error),
        }
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        candle_core::Error::wrap(error)
    }
}
