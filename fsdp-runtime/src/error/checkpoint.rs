//! What can be wrong with a checkpoint.

use std::path::PathBuf;

use crate::files::{FileError, Mismatch, NOT_TIED, brief, said};

/// Most characters of differences in a message; of the sections beyond, only their number is told.
const DIFFERENCES: usize = 1200;

/// Why a checkpoint cannot be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A file or directory could not be made, opened, read, written, renamed or removed.
    #[error(transparent)]
    File(#[from] FileError),
    /// A rank failed; all ranks report the same.
    #[error("rank {rank}: {message}")]
    OnRank {
        /// The first rank that failed.
        rank: usize,
        /// Why.
        message: String,
    },
    /// There is no checkpoint in a directory where one was asked for.
    #[error("`{}` is not a checkpoint: it has no `index.json`", .path.display())]
    NotACheckpoint {
        /// The directory.
        path: PathBuf,
    },
    /// An index, or a file that it names, is not what it claims to be.
    #[error("`{}` is not valid: {}", .path.display(), said(.reason))]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Bytes that are not those that were written.
    #[error(
        "`{}` is corrupted: bytes {offset}..{} have the checksum {found:08x}, {expected:08x} was written (in tensor \
         `{}`)",
        .path.display(), .offset.saturating_add(*.len), brief(.tensor)
    )]
    Corrupted {
        /// The file.
        path: PathBuf,
        /// First byte of the block.
        offset: u64,
        /// Bytes of the block.
        len: u64,
        /// The tensor that it is of, with its section.
        tensor: String,
        /// Checksum in the index.
        expected: u32,
        /// Checksum of what is there.
        found: u32,
    },
    /// A checkpoint of a later format.
    #[error("`{}` has format version {found}: this program knows versions up to {supported}", .path.display())]
    Version {
        /// The index.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// The latest that can be read.
        supported: u64,
    },
    /// The checkpoint is of another model, or of other training state.
    #[error("checkpoint `{}` does not fit:{}", .path.display(), listed(.sections))]
    Mismatch {
        /// The checkpoint.
        path: PathBuf,
        /// All differences, by section.
        sections: Vec<(String, Mismatch)>,
    },
    /// The checkpoint is of training with another optimizer.
    #[error("checkpoint `{}` does not fit: its optimizer is {}, expected {expected}", .path.display(), brief(.found))]
    OtherOptimizer {
        /// The checkpoint.
        path: PathBuf,
        /// Name of its optimizer's rule.
        found: String,
        /// That of the one to be restored.
        expected: String,
    },
    /// What rank 0 has in memory is of another model.
    #[error("the full state of rank 0 does not fit:{}", .mismatch.lines("given"))]
    OtherState {
        /// All differences.
        mismatch: Box<Mismatch>,
    },
    /// A checkpoint that is no longer there.
    #[error("checkpoint `{}` was removed while it was read", .path.display())]
    Removed {
        /// The checkpoint.
        path: PathBuf,
    },
    /// State that a checkpoint does not have.
    #[error("checkpoint `{}` has no {}: it has {present}", .path.display(), brief(.what))]
    Absent {
        /// The checkpoint.
        path: PathBuf,
        /// What was asked for.
        what: String,
        /// What there is of the kind.
        present: String,
    },
    /// Another model, of this program or another one, has saved into the directory and is still there: it may go on.
    #[error("`{}` is that of another run, which has not ended: every run needs a directory of its own", .path.display())]
    Busy {
        /// The directory.
        path: PathBuf,
    },
    /// The directory has a checkpoint of a later step, which would still be the latest one.
    #[error(
        "`{}` has a checkpoint of step {latest}, so one of step {step} would not be the latest: remove what the run has \
         given up, or save into another directory",
        .path.display()
    )]
    NotLatest {
        /// The directory.
        path: PathBuf,
        /// Step of its latest checkpoint.
        latest: u64,
        /// Step that was to be saved.
        step: u64,
    },
    /// A checkpoint was saved and is complete, but what it makes needless could not be removed.
    #[error("checkpoint `{}` is complete, but what is no longer needed is still there: {message}", .path.display())]
    NotRemoved {
        /// The new checkpoint.
        path: PathBuf,
        /// What could not be removed, and why.
        message: String,
    },
    /// A setting that makes no sense, or a call at a time when it makes none.
    #[error("{0}")]
    Usage(String),
}

fn listed(sections: &[(String, Mismatch)]) -> String {
    let mut text = String::new();
    for (at, (section, mismatch)) in sections.iter().enumerate() {
        if text.len() > DIFFERENCES {
            return format!("{text}\n and {} more sections", sections.len() - at);
        }
        text += &format!("\n {}:{mismatch}", brief(section));
    }
    if sections.iter().flat_map(|(_, mismatch)| &mismatch.ties).any(|tie| tie.expected == NOT_TIED) {
        text.push_str("\n `Restore::untied` fills each tensor that was tied from the one that was saved");
    }
    text
}
