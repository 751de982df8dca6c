//! Errors of collectives, streams and meshes.

use std::any::Any;

use crate::mesh::MeshError;

/// A failed collective, stream or rank. Cheap to clone: every waiter gets one.
///
/// Each message stands alone: it says which rank reports, which collective of which unit it was in, what was
/// expected and what came. Ranks are world ranks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum CommError {
    /// The ranks of the group are not in the same collective.
    #[error("rank {rank}: {message}")]
    Diverged {
        /// The rank that reports.
        rank: usize,
        /// Which collective each rank is in.
        message: String,
    },
    /// A rank panicked, returned an error, or returned while others wait for it.
    #[error("rank {rank}: {message}")]
    RankFailed {
        /// The rank that reports.
        rank: usize,
        /// The rank that failed.
        failed: usize,
        /// How, and in which collective it was last seen.
        message: String,
    },
    /// A collective was not reached by all ranks in time.
    #[error("rank {rank}: {message}")]
    TimedOut {
        /// The rank that reports.
        rank: usize,
        /// The ranks that did not arrive.
        missing: Vec<usize>,
        /// The collective, who arrived, and where the missing ranks were last seen.
        message: String,
    },
    /// Work on a stream panicked, or the stream could not be made. The stream's name carries the rank.
    #[error("stream `{stream}`: {message}")]
    Stream {
        /// Name of the stream.
        stream: String,
        /// What happened, with the text of the panic.
        message: String,
    },
    /// There is not as much memory.
    #[error("{device}: {message}")]
    Memory {
        /// Whose memory: `host`, `cuda:0`.
        device: String,
        /// How much was asked for, and what is known of the rest.
        message: String,
    },
    /// The arguments of a call do not fit together; nothing was sent.
    #[error("rank {rank}: {message}")]
    Invalid {
        /// The rank that reports.
        rank: usize,
        /// The call, what was expected and what came.
        message: String,
    },
}

/// An error of the ranks' arrangement, or of what they do together. Cheap to clone.
///
/// It will have no other variants: the crates above turn each into one of their own.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// A collective, a stream or a rank failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The ranks cannot be arranged as asked.
    #[error(transparent)]
    Mesh(#[from] MeshError),
}

/// Result of calls that may fail in both ways.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The text of an error that names `rank` at its start, for a message that has named it already.
pub fn without_rank(rank: usize, text: &str) -> &str {
    let rest = text.strip_prefix("rank ").and_then(|text| text.strip_prefix(&rank.to_string()));
    rest.and_then(|text| text.strip_prefix(": ").or_else(|| text.strip_prefix(", "))).unwrap_or(text)
}

/// The text a panic was raised with.
pub fn panic_text(payload: &(dyn Any + Send)) -> String {
    if let Some(text) = payload.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.clone()
    } else {
        "a panic without text".to_owned()
    }
}
