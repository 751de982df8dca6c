//! How large a bucket is at most whose shards hold whole rows.

use super::full;
use crate::layout::row::{MAX_ELEMENTS, SPLIT_SAVES, TRIES, lcm};

/// Most lengths of rows in a bucket.
const MAX_ROWS: usize = 16;

/// The rows of a bucket's items.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    /// Length of a row, and the elements of all that are so long.
    lens: [(usize, usize); MAX_ROWS],
    len: usize,
    items: usize,
    /// Most elements that gaps before items take where each begins with a whole row.
    gaps: usize,
}

impl Rows {
    pub(super) const NONE: Rows = Rows { lens: [(0, 0); MAX_ROWS], len: 0, items: 0, gaps: 0 };

    /// Adds an item of `numel` elements in rows of `row`.
    #[track_caller]
    pub(super) const fn add(&mut self, numel: usize, row: usize) {
        let mut i = 0;
        while i < self.len && self.lens[i].0 != row {
            i += 1;
        }
        if i == MAX_ROWS {
            full(MAX_ROWS, "lengths of rows in a bucket");
        }
        if i == self.len {
            self.len += 1;
        }
        self.lens[i] = (row, self.lens[i].1.saturating_add(numel));
        self.items += 1;
        self.gaps = self.gaps.saturating_add(row - 1);
    }

    /// Makes what was added since `before` be there `times`.
    pub(super) const fn repeat(&mut self, before: &Rows, times: usize) {
        let mut i = 0;
        while i < self.len {
            let (row, numel) = self.lens[i];
            self.lens[i] = (row, again(before.lens[i].1, numel, times));
            i += 1;
        }
        self.items = again(before.items, self.items, times);
        self.gaps = again(before.gaps, self.gaps, times);
    }

    /// Elements that [`row::place`](crate::layout::row::place) makes of the items at most, over all buckets that it cuts
    /// them in; `None` if they are too many.
    pub(super) const fn most(&self, numel: usize, ranks: usize, align: usize) -> Option<usize> {
        if numel == 0 {
            return Some(0);
        }
        // A bucket for each length of rows always works. It makes no more of them where that saves less than this.
        let worth = if numel / SPLIT_SAVES > ranks * align { numel / SPLIT_SAVES } else { ranks * align };
        let (mut apart, mut common) = (0usize, Some(1));
        let mut i = 0;
        while i < self.len {
            let (row, numel) = self.lens[i];
            let shard = (numel / row).div_ceil(ranks).saturating_mul(row);
            let more = if i > 0 { worth } else { 0 };
            apart = apart.saturating_add(shard.saturating_mul(ranks)).saturating_add(more);
            common = match common {
                Some(multiple) => lcm(multiple, row),
                None => None,
            };
            i += 1;
        }
        if self.len > 1 && apart < numel.saturating_add(worth) {
            apart = numel.saturating_add(worth);
        }
        // And so does one for all, of shards of a multiple of all rows: it is found within so many tries, none of which
        // goes further beyond what is needed than by a multiple.
        let together = match common {
            Some(multiple) if self.items < TRIES * ranks => {
                numel.saturating_add(self.gaps).saturating_add((multiple + 1).saturating_mul(ranks))
            }
            _ => usize::MAX,
        };
        let most = if together < apart { together } else { apart };
        match most.checked_next_multiple_of(ranks) {
            Some(most) if most <= MAX_ELEMENTS => Some(most),
            _ => None,
        }
    }
}

const fn again(before: usize, after: usize, times: usize) -> usize {
    before.saturating_add((after - before).saturating_mul(times))
}
