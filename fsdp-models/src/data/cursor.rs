//! A run's position in its data. A resumed run continues with the next sample.

use super::{DataCursor, DataError};

impl DataCursor {
    /// The samples served, if `now`, the present source at the same place, has the same samples in the same order.
    pub(super) fn matches(&self, now: &DataCursor) -> Result<u64, DataError> {
        if self == now {
            return Ok(self.samples);
        }
        Err(DataError::OtherData { before: self.clone(), now: now.clone() })
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
