//! The crate's error. It has one variant for each area, and each area has an enum of its own, which is public there.

mod config;
mod data;
mod generate;
mod lora;
mod path;
mod plot;
mod pretrained;
mod tokenizer;
mod train;

use fsdp::checkpoint::CheckpointError;
use fsdp::files::{FileError, TensorFileError};

pub use self::config::ConfigError;
pub use self::data::DataError;
pub use self::generate::GenerateError;
pub(crate) use self::lora::MAX_RANK;
pub use self::lora::{LoraError, PROJECTIONS};
pub use self::path::PathError;
pub use self::plot::PlotError;
pub use self::pretrained::PretrainedError;
pub use self::tokenizer::TokenizerError;
pub use self::train::TrainError;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Whatever can go wrong in this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be opened, read, written or renamed.
    #[error(transparent)]
    File(#[from] FileError),
    /// Text or token input.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A model configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Adapters.
    #[error(transparent)]
    Lora(#[from] LoraError),
    /// A completion.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// A safetensors file of weights.
    #[error(transparent)]
    Weights(#[from] TensorFileError),
    /// A checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A pretrained model.
    #[error(transparent)]
    Pretrained(#[from] PretrainedError),
    /// A tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A chart.
    #[error(transparent)]
    Plot(#[from] PlotError),
    /// A place to write to.
    #[error(transparent)]
    Path(#[from] PathError),
    /// A training run.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// The sharded model.
    #[error(transparent)]
    Fsdp(#[from] fsdp::Error),
    /// A tensor operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}
