//! Errors of places to write to.

use std::path::PathBuf;

/// Why something cannot be written where it was to be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PathError {
    /// It would overwrite an input or another output.
    #[error("{option} and {other} are the same file, `{}`", .path.display())]
    Same {
        /// What is to be written.
        option: &'static str,
        /// What it would overwrite.
        other: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// Something is in a directory that is another's.
    #[error(
        "{option} is `{}`, which is in `{}`, a directory that {other} {what}: give another place",
        .path.display(), .outer.display()
    )]
    Inside {
        /// What is inside.
        option: &'static str,
        /// Where.
        path: PathBuf,
        /// The directory.
        outer: PathBuf,
        /// Whose it is.
        other: &'static str,
        /// What it does with it.
        what: &'static str,
    },
    /// It would be in a checkpoint, which goes with all that is in it.
    #[error(
        "{option} is `{}`: `{}` is a checkpoint, which nothing else is written to: give another place",
        .path.display(), .checkpoint.display()
    )]
    InCheckpoint {
        /// What is to be written.
        option: &'static str,
        /// Where.
        path: PathBuf,
        /// The checkpoint.
        checkpoint: PathBuf,
    },
    /// It would be where checkpoints come and go.
    #[error("{option} is `{}`, where a run has its checkpoints: give another place", .path.display())]
    OfARun {
        /// What is to be written.
        option: &'static str,
        /// Where.
        path: PathBuf,
    },
    /// It would be among the files of a model.
    #[error("{option} is `{}`: `{}` is the directory of a model: give another place", .path.display(), .model.display())]
    InModel {
        /// What is to be written.
        option: &'static str,
        /// Where.
        path: PathBuf,
        /// The model.
        model: PathBuf,
    },
    /// There is something that cannot be written to.
    #[error("cannot write {option} to `{}`: {reason}", .path.display())]
    Kind {
        /// What is to be written.
        option: &'static str,
        /// Where.
        path: PathBuf,
        /// What is wrong with what is there.
        reason: &'static str,
    },
}
