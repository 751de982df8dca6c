//! How launches fail.

use std::fmt;

use super::MAX_RANKS;
use crate::comm::CommError;

/// How the run of one rank ended, if not well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RankEnd {
    /// It panicked, with this text.
    Panicked(String),
    /// It returned this error.
    Failed(String),
    /// It returned without an error of its own, while others waited for it for instance: what they say of it.
    Returned(String),
}

/// A rank that did not end well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankFailure {
    /// The rank.
    pub rank: usize,
    /// What became of it.
    pub end: RankEnd,
}

impl fmt::Display for RankFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.end {
            RankEnd::Panicked(text) => write!(f, "rank {} panicked: {text}", self.rank),
            RankEnd::Failed(text) => write!(f, "rank {} failed: {text}", self.rank),
            // The text names the rank.
            RankEnd::Returned(text) => f.write_str(text),
        }
    }
}

/// Why a launch did not end well.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// A launch needs at least one rank.
    #[error("a launch needs at least one rank, 0 were asked for")]
    NoRanks,
    /// More ranks than threads can be expected to start.
    #[error("{ranks} ranks were asked for; {MAX_RANKS} is the most that one process launches")]
    TooManyRanks {
        /// Number of ranks.
        ranks: usize,
    },
    /// A setting from the environment is wrong; no rank was started.
    #[error("{0}")]
    Setting(String),
    /// This process could not join the other ranks'.
    #[error(transparent)]
    Join(#[from] CommError),
    /// The system could not start the thread of a rank; those that had started were ended.
    #[error("rank {rank} could not be started with a stack of {stack_size} bytes: {message}")]
    Start {
        /// The rank.
        rank: usize,
        /// Bytes of stack that were asked for.
        stack_size: usize,
        /// The system's reason.
        message: String,
    },
    /// Ranks failed.
    #[error("{}", describe(.first, .others))]
    Ranks {
        /// The root cause: the rank that failed first, or that saw the failure first.
        first: RankFailure,
        /// The other ranks that failed, by rank: in general because of the first.
        others: Vec<RankFailure>,
    },
}

fn describe(first: &RankFailure, others: &[RankFailure]) -> String {
    let mut text = first.to_string();
    for (i, other) in others.iter().enumerate() {
        text += if i == 0 { "\nafter that:\n  " } else { "\n  " };
        text += &other.to_string();
    }
    text
}

/// All values, or the failures with the root cause first.
pub(super) fn collect<T>(
    ends: Vec<Result<T, RankEnd>>,
    world_failure: Option<(usize, String)>,
) -> Result<Vec<T>, LaunchError> {
    let mut values = Vec::with_capacity(ends.len());
    let mut failures = Vec::new();
    for (rank, end) in ends.into_iter().enumerate() {
        match end {
            Ok(value) => values.push(value),
            Err(end) => failures.push(RankFailure { rank, end }),
        }
    }
    if failures.is_empty() && world_failure.is_none() {
        return Ok(values);
    }
    // A collective that failed counts even if every rank returned without looking at its outcome.
    let first = match world_failure {
        Some((culprit, message)) => match failures.iter().position(|failure| failure.rank == culprit) {
            Some(at) => failures.remove(at),
            None => RankFailure { rank: culprit, end: RankEnd::Returned(message) },
        },
        None => failures.remove(0),
    };
    Err(LaunchError::Ranks { first, others: failures })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_cause_comes_first() {
        let failed = |text: &str| Err(RankEnd::Failed(text.to_owned()));
        let ends: Vec<Result<(), _>> =
            vec![failed("follower"), Err(RankEnd::Panicked("boom".into())), Ok(())];
        let error = collect(ends, Some((1, "..".into()))).unwrap_err();
        assert_eq!(error.to_string(), "rank 1 panicked: boom\nafter that:\n  rank 0 failed: follower");
    }
}
