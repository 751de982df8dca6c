//! Files that appear whole or not at all, and named tensors in safetensors files. Tensors are read and written in pieces, so that
//! no rank ever holds a whole model.

mod atomic;
mod dtype;
mod lock;
mod mismatch;
mod open;
mod positioned;
mod reader;
mod turns;
mod writer;

use std::path::{Path, PathBuf};

pub use atomic::{AtomicFile, remove_unfinished};
pub use dtype::StoredDtype;
pub use fsdp_layout::brief::{brief, brief_to, listed, said};
pub(crate) use fsdp_layout::brief::{listed_as, shown};
pub(crate) use lock::{FileLock, FileLocks};
pub(crate) use mismatch::NOT_TIED;
pub use mismatch::{Difference, DtypeMismatch, FoundTensor, Mismatch, ShapeMismatch};
pub(crate) use open::open_no_link;
pub use open::{open, open_to_write, read, read_to_string};
pub use positioned::PositionedFile;
pub use reader::TensorFile;
pub(crate) use turns::{Turn, Turns};
pub use writer::{TensorFileWriter, save_bf16, save_f32};

/// A failed operation on one file or directory. Its message has that of the cause, which so is no `source()`.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} `{}`: {cause}", shown(path))]
pub struct FileError {
    /// What was attempted, to follow "cannot": `open`, `read`, `write`.
    pub action: &'static str,
    /// The file or directory.
    pub path: PathBuf,
    /// Why it failed.
    pub cause: std::io::Error,
}

impl FileError {
    /// Turns an I/O error into one that names the file: `.map_err(FileError::on("read", path))`.
    pub fn on(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> FileError {
        move |cause| FileError { action, path: path.to_path_buf(), cause }
    }
}

/// What can be wrong with a file of weights or with the way it is used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TensorFileError {
    /// The file cannot be opened, read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not what it claims to be.
    #[error("`{}` is not a valid safetensors file: {reason}", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The file is of another model.
    #[error("`{}` does not fit the model:{}", .path.display(), .mismatch)]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// All differences.
        mismatch: Box<Mismatch>,
    },
    /// A tensor that is not in the file.
    #[error("`{}` has no tensor `{}`", .path.display(), brief(.name))]
    NoTensor {
        /// The file.
        path: PathBuf,
        /// The tensor asked for.
        name: String,
    },
    /// A range that goes past the end of its tensor.
    #[error(
        "elements {start}..{} of tensor `{}` in `{}` were asked for: it has {elements}",
        .start.saturating_add(*.len), brief(.name), .path.display()
    )]
    OutOfRange {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// First element asked for.
        start: usize,
        /// Elements asked for.
        len: usize,
        /// Elements of the tensor.
        elements: usize,
    },
    /// An element type that cannot be converted to the one wanted.
    #[error("tensor `{}` in `{}` is {found}: expected {expected}", brief(.name), .path.display())]
    Dtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its element type.
        found: String,
        /// What can be read.
        expected: &'static str,
    },
    /// A tensor declared twice.
    #[error("tensor `{}` of `{}` is declared twice", brief(.name), .path.display())]
    Duplicate {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// A file that was finished before all of it was written.
    #[error("`{}` is incomplete: {written} of {elements} elements of tensor `{}` were written", .path.display(), brief(.name))]
    Incomplete {
        /// The file.
        path: PathBuf,
        /// The first such tensor.
        name: String,
        /// Elements written.
        written: usize,
        /// Elements of the tensor.
        elements: usize,
    },
}
