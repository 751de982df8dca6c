//! A rank's thread.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::{RankEnd, World};
use crate::comm::local::LocalWorld;
use crate::comm::tcp::TcpComm;
use crate::comm::{panic_text, without_rank};
use crate::device::cpu::WorkerScope;
use crate::sync::thread::ScopedJoinHandle;

pub(super) fn join_rank<T>(thread: ScopedJoinHandle<'_, Result<T, RankEnd>>) -> Result<T, RankEnd> {
    match thread.join() {
        Ok(end) => end,
        Err(payload) => Err(RankEnd::Panicked(panic_text(&*payload))),
    }
}

/// Who is told how a rank has ended.
pub(super) trait Ends {
    /// The rank's code begins, in this thread.
    fn begin(&self, _rank: usize) {}

    /// The rank's code is over, and has not failed.
    fn returns(&self, _rank: usize) {}

    fn finish(&self, rank: usize);

    /// `how` follows the rank's name.
    fn fail(&self, rank: usize, how: &str);
}

impl Ends for Arc<LocalWorld> {
    fn begin(&self, rank: usize) {
        LocalWorld::begin(self, rank);
    }

    fn returns(&self, rank: usize) {
        LocalWorld::returns(self, rank);
    }

    fn finish(&self, rank: usize) {
        LocalWorld::finish(self, rank);
    }

    fn fail(&self, rank: usize, how: &str) {
        LocalWorld::fail(self, rank, how);
    }
}

impl Ends for TcpComm {
    fn begin(&self, _: usize) {
        TcpComm::begin(self);
    }

    fn finish(&self, _: usize) {
        self.leave(None);
    }

    fn fail(&self, _: usize, how: &str) {
        self.leave(Some(how));
    }
}

/// A rank's thread: runs its code and tells the others how it ended.
pub(super) fn run_rank<T, E, F>(
    ends: &impl Ends,
    rank: usize,
    world: Result<World, String>,
    rank_main: &F,
) -> Result<T, RankEnd>
where
    E: fmt::Display,
    F: Fn(World) -> Result<T, E>,
{
    let workers = WorkerScope::enter();
    ends.begin(rank);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        // The alternate form, by which some error types give their causes too.
        rank_main(world?).map_err(|error| format!("{error:#}"))
    }));
    let end = match outcome {
        Ok(Ok(value)) => {
            ends.returns(rank);
            // What is still under way on its streams, peers take part in.
            workers.join();
            ends.finish(rank);
            return Ok(value);
        }
        Ok(Err(text)) => {
            ends.fail(rank, &format!("failed: {}", without_rank(rank, &text)));
            RankEnd::Failed(text)
        }
        Err(payload) => {
            let text = panic_text(&*payload);
            ends.fail(rank, &format!("panicked: {text}"));
            RankEnd::Panicked(text)
        }
    };
    // Only now: workers of this rank may wait for peers that only this failure wakes.
    workers.join();
    Err(end)
}
