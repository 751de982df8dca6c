//! Errors of launches.

use std::fmt;

use super::MAX_RANKS;
use crate::comm::{CommError, without_rank};

/// How the run of one rank ended, if not well.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
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

impl RankFailure {
    /// What became of it, behind its name.
    fn end(&self) -> String {
        match &self.end {
            RankEnd::Panicked(text) => format!("panicked: {text}"),
            RankEnd::Failed(text) => format!("failed: {}", without_rank(self.rank, text)),
            RankEnd::Returned(text) => format!("returned: {}", without_rank(self.rank, text)),
        }
    }
}

impl fmt::Display for RankFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.end {
            // The text names the rank.
            RankEnd::Returned(text) => f.write_str(text),
            _ => write!(f, "rank {} {}", self.rank, self.end()),
        }
    }
}

/// Why a launch did not end well.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
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

/// The first failure, and then each other one once, with the ranks that it is of.
fn describe(first: &RankFailure, others: &[RankFailure]) -> String {
    let mut ends: Vec<(String, Vec<usize>)> = Vec::new();
    for other in others {
        let end = other.end();
        match ends.iter_mut().find(|(known, _)| *known == end) {
            Some((_, ranks)) => ranks.push(other.rank),
            None => ends.push((end, vec![other.rank])),
        }
    }
    let mut text = first.to_string();
    let own = first.end();
    if let Some(same) = ends.iter().position(|(end, _)| *end == own) {
        text += &format!("\nthe same on {}", named(&ends.remove(same).1));
    }
    for (i, (end, ranks)) in ends.iter().enumerate() {
        text += if i == 0 { "\nafter that:\n  " } else { "\n  " };
        text += &format!("{} {end}", named(ranks));
    }
    text
}

/// `rank 1`, or `ranks 0, 2`.
fn named(ranks: &[usize]) -> String {
    let all = ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    if ranks.len() == 1 { format!("rank {all}") } else { format!("ranks {all}") }
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

    #[test]
    fn what_several_ranks_say_is_said_once() {
        let failed = |text: &str| Err(RankEnd::Failed(text.to_owned()));
        let ends: Vec<Result<(), _>> = vec![
            failed("rank 0: they differ"),
            failed("rank 1, unit `a`: they differ"),
            failed("rank 2: they differ"),
            failed("rank 3: they differ"),
            failed("rank 2 has left"),
            failed("rank 5, unit `a`: they differ"),
        ];
        let text = "rank 2 failed: they differ\nthe same on ranks 0, 3\nafter that:\n  ranks 1, 5 failed: unit `a`: \
                    they differ\n  rank 4 failed: rank 2 has left";
        assert_eq!(collect(ends, Some((2, "..".into()))).unwrap_err().to_string(), text);
    }
}
