//! How the parts of a collective are cut into rounds: each rank's window has room for so many bytes at a time.
//!
//! All ranks make the same plan, from the sizes that they have compared.

use crate::spec::Dtype;

/// Alignment of each item in a window.
const ALIGN: usize = 64;

/// Some elements of a part that go through the windows together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Item {
    /// Which part.
    pub(super) part: usize,
    /// The first of the elements, in each rank's share.
    pub(super) start: usize,
    pub(super) len: usize,
    /// Where they are in the lane, in bytes.
    pub(super) at: usize,
}

impl Item {
    /// The elements that are in a share of `len`: shares of one part differ by an element at most.
    pub(super) fn within(&self, len: usize) -> std::ops::Range<usize> {
        self.start.min(len)..(self.start + self.len).min(len)
    }
}

/// What goes in each round through a lane of so many bytes, of parts of these elements a share.
pub(super) fn rounds(shares: impl IntoIterator<Item = (usize, Dtype)>, lane: usize) -> Vec<Vec<Item>> {
    let (mut rounds, mut round, mut used) = (Vec::new(), Vec::new(), 0);
    for (part, (elements, dtype)) in shares.into_iter().enumerate() {
        let mut start = 0;
        while start < elements {
            let room = (lane - used) / dtype.size();
            if room == 0 {
                rounds.push(std::mem::take(&mut round));
                used = 0;
                continue;
            }
            let len = room.min(elements - start);
            round.push(Item { part, start, len, at: used });
            start += len;
            used = (used + len * dtype.size()).next_multiple_of(ALIGN).min(lane);
        }
    }
    if !round.is_empty() {
        rounds.push(round);
    }
    rounds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_goes_once_and_fits() {
        for lane in [64, 128, 4096] {
            let shares =
                [(0, Dtype::F32), (1, Dtype::BF16), (100, Dtype::F32), (7, Dtype::F16), (3000, Dtype::F32)];
            let rounds = rounds(shares, lane);
            let mut next = [0; 5];
            for round in &rounds {
                assert!(!round.is_empty());
                for (i, item) in round.iter().enumerate() {
                    let end = item.at + item.len * shares[item.part].1.size();
                    assert!(item.at % ALIGN == 0 && end <= round.get(i + 1).map_or(lane, |next| next.at));
                    assert_eq!(item.start, next[item.part], "in order, without gaps");
                    next[item.part] += item.len;
                }
            }
            assert_eq!(next, shares.map(|(elements, _)| elements));
            let bytes: usize =
                shares.iter().map(|(n, dtype)| (n * dtype.size()).next_multiple_of(ALIGN)).sum();
            assert!(rounds.len() <= bytes / lane + 1 + shares.len(), "{} rounds", rounds.len());
        }
    }

    #[test]
    fn an_item_ends_with_the_share() {
        let item = Item { part: 0, start: 4, len: 4, at: 0 };
        assert_eq!((item.within(9), item.within(7), item.within(3)), (4..8, 4..7, 3..3));
    }
}
