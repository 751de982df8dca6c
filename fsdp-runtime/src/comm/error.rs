//! How a collective fails.

/// A failed collective or a failed rank. Cheap to clone: every waiter gets one.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CommError {
    /// The ranks of the group are not in the same collective.
    #[error("rank {rank}: {message}")]
    Diverged {
        /// The rank that reports.
        rank: usize,
        /// Which collective each rank is in.
        message: String,
    },
}
