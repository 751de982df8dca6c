//! The record of collectives that run on devices: ranks compare their calls in it.

use std::sync::Arc;
use std::time::Duration;

use super::CommError;
use super::arguments::Caller;
use super::call::{Call, Op};

/// The side of a communicator of the host that keeps collectives of devices in step: its ranks compare what they call,
/// know who is where, and learn of each other's failures. A communicator that reduces on devices is made on one.
#[derive(Clone)]
pub struct Control(pub(super) Arc<dyn Ledger>);

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").finish_non_exhaustive()
    }
}

/// How far a rank's device is with a collective that the rank has called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(super) enum Stage {
    Called,
    Started,
    Done,
}

/// Why a rank gives up.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(super) enum Trouble {
    /// Time has run out.
    Late,
    /// What failed here, in words.
    Here(String),
    /// What failed because of another rank or on the way to it, in words.
    Elsewhere(String),
}

/// One rank's end of a communicator's record of calls.
pub(super) trait Ledger: Send + Sync {
    /// This rank.
    fn caller(&self) -> Caller;

    /// The rank in the world of a rank of the group; itself if there is none.
    #[allow(dead_code, reason = "asked for by collectives of devices only")]
    fn world_rank(&self, index: usize) -> usize;

    /// How long a rank waits for its peers.
    #[allow(dead_code, reason = "asked for by collectives of devices only")]
    fn timeout(&self) -> Duration;

    /// Enters a call in the order of this rank's calls, those of the host included, and gives its number.
    ///
    /// # Errors
    /// If a peer has called something else at this place, is gone, or the world has failed.
    fn call(&self, call: Call) -> Result<u64, CommError>;

    /// The device of this rank has come to the call, or is done with it.
    fn reached(&self, number: u64, stage: Stage);

    /// Counts what was enqueued.
    fn count(&self, op: Op, bytes_from_peers: usize);

    /// Fails the world because of `trouble`, in a call or outside of any, unless it has failed before. The first
    /// failure, as this rank reports it.
    fn give_up(&self, number: Option<u64>, trouble: Trouble) -> CommError;

    /// The failure of the world, as this rank reports it.
    fn failure(&self) -> Option<CommError>;
}
