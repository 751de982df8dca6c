//! Counters of a rank's collectives and bytes, by kind.

use std::sync::atomic::{AtomicU64, Ordering};

use super::CommCounter;
use super::call::Op;

/// What one rank has done on a communicator, its duplicates and its groups.
#[derive(Default)]
pub(super) struct Traffic([Counter; Op::NAMES.len()]);

#[derive(Default)]
struct Counter {
    calls: AtomicU64,
    bytes_from_peers: AtomicU64,
}

impl Traffic {
    pub(super) fn count(&self, op: Op, bytes_from_peers: usize) {
        let counter = &self.0[op.index()];
        counter.calls.fetch_add(1, Ordering::Relaxed);
        counter.bytes_from_peers.fetch_add(bytes_from_peers as u64, Ordering::Relaxed);
    }

    pub(super) fn counters(&self) -> Vec<(&'static str, CommCounter)> {
        let read = |counter: &Counter| CommCounter {
            calls: counter.calls.load(Ordering::Relaxed),
            bytes_from_peers: counter.bytes_from_peers.load(Ordering::Relaxed),
        };
        Op::NAMES.into_iter().zip(self.0.iter().map(read)).collect()
    }
}
