//! The crate's error: one variant an area, each area with an enum of its own.

use std::path::{Path, PathBuf};

use crate::{
    config::ConfigError, data::DataError, trainer::TrainError, trainer::plot::PlotError,
    weights::WeightsError,
};

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Whatever can go wrong in this crate.
#[derive(Debug, thiserror::Error)]
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
    /// A safetensors file of weights.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A chart.
    #[error(transparent)]
    Plot(#[from] PlotError),
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

/// A failed operation on one file or directory.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} `{}`: {source}", path.display())]
pub struct FileError {
    /// What was attempted, to follow "cannot": `open`, `read`, `write`.
    pub action: &'static str,
    /// The file or directory.
    pub path: PathBuf,
    /// Why it failed.
    pub source: std::io::Error,
}

impl FileError {
    /// Turns an I/O error into one that names the file: `.map_err(FileError::on("read", path))`.
    pub(crate) fn on(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> FileError {
        move |source| FileError { action, path: path.to_path_buf(), source }
    }
}
