//! Errors of charts.

use std::path::PathBuf;

use fsdp::files::FileError;

/// Why there is no chart.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlotError {
    /// The file cannot be written.
    #[error(transparent)]
    File(#[from] FileError),
    /// A kind of picture that is not drawn.
    #[error("cannot draw into `{}`: it would be an SVG, so its name must end in .svg", .path.display())]
    Ending {
        /// The file.
        path: PathBuf,
    },
    /// The chart could not be drawn.
    #[error("cannot draw the curves: {0}")]
    Drawing(String),
}
