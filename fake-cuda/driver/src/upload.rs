//! What the host has copied to the device and nothing has overwritten: shapes and strides, by which a kernel says what
//! it touches before the copy has run.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The longest copy that is remembered.
const LONGEST: usize = 1024;

#[derive(Default)]
pub struct Uploads(BTreeMap<usize, Arc<[u8]>>);

impl Uploads {
    /// Remembers a copy of `bytes` to `start`.
    pub fn keep(&mut self, start: usize, bytes: &[u8]) {
        if bytes.len() <= LONGEST {
            self.0.insert(start, bytes.into());
        }
    }

    /// Something else happens to the bytes at `range`.
    pub fn forget(&mut self, range: &Range<usize>) {
        let near = range.start.saturating_sub(LONGEST)..range.end;
        let touched = self.0.range(near).filter(|(start, bytes)| *start + bytes.len() > range.start);
        for start in touched.map(|(start, _)| *start).collect::<Vec<_>>() {
            self.0.remove(&start);
        }
    }

    /// What was copied to `start`.
    pub fn at(&self, start: usize) -> Option<Arc<[u8]>> {
        self.0.get(&start).cloned()
    }
}
