//! Checkpoints as files: inspects, compares and exports them.
//!
//! One process does all of this, without other ranks. It reads tensors in pieces.

mod diff;
mod elements;
mod export;
mod facts;
mod progress;
mod sides;
mod summary;

use std::fs;
use std::path::{Path, PathBuf};

use fsdp::checkpoint::{Checkpoints, INDEX_FILE};
use fsdp::files::FileError;

pub use diff::{Differences, PairDifference, diff};
pub use elements::{Largest, ValueDifference};
pub use export::{ExportOptions, Exported, export};
pub use progress::WorkProgress;
pub use sides::Side;
pub use summary::{Listing, list, summary, summary_json};

/// The checkpoint at `path`: `path` itself, or the latest one in it if it is a directory of checkpoints.
///
/// # Errors
/// If there is nothing at `path`, or the directory cannot be read. A path at which there is neither is returned as it is: to
/// open it tells so.
pub fn find(path: &Path) -> crate::Result<PathBuf> {
    let found = fs::metadata(path).map_err(FileError::on("open", path))?;
    if path.join(INDEX_FILE).exists() || !found.is_dir() {
        return Ok(path.to_path_buf());
    }
    Ok(Checkpoints::new(path).latest()?.unwrap_or_else(|| path.to_path_buf()))
}
