//! A run's position in its data. A resumed run continues with the next sample.

use std::fmt;

use fsdp::files::brief;
use serde::{Deserialize, Serialize};

use super::DataError;

/// A place in the order of samples that a source serves: what a checkpoint keeps of the data.
///
/// It counts samples, not steps: training goes on at the very next sample on any number of ranks, with any number of
/// microbatches, and with another global batch too, whose first row is then that sample. What the samples are, and
/// their order, must be the same: [`Batches::resume`](super::Batches::resume) compares the rest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataCursor {
    /// Samples served since the first step, over all epochs.
    pub samples: u64,
    /// Key of the order of samples.
    pub seed: u64,
    /// Predicted tokens of a sample.
    pub seq: usize,
    /// What the samples are cut from: kind, length and a hash of the content.
    pub source: String,
}

impl DataCursor {
    /// The samples served, if `now`, the present source at the same place, has the same samples in the same order.
    pub(super) fn matches(&self, now: &DataCursor) -> Result<u64, DataError> {
        if self == now {
            return Ok(self.samples);
        }
        Err(DataError::OtherData { before: self.clone(), now: now.clone() })
    }
}

impl fmt::Display for DataCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in sequences of {} tokens, order {}", brief(&self.source), self.seq, self.seed)
    }
}

/// 64-bit FNV-1a of a source's content.
#[derive(Clone, Copy)]
pub(super) struct Fingerprint(u64);

impl Fingerprint {
    pub(super) fn new() -> Self {
        Fingerprint(0xcbf2_9ce4_8422_2325)
    }

    pub(super) fn add(&mut self, bytes: impl IntoIterator<Item = u8>) {
        self.0 = bytes
            .into_iter()
            .fold(self.0, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    }

    /// `1024 bytes (fnv1a 85944171f73967e8)`.
    pub(super) fn describe(self, len: usize, of: &str) -> String {
        format!("{len} {of} (fnv1a {:016x})", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_the_published_one() {
        let mut hash = Fingerprint::new();
        hash.add(*b"foo");
        hash.add(*b"bar");
        assert_eq!(hash.describe(6, "bytes"), "6 bytes (fnv1a 85944171f73967e8)");
    }
}
