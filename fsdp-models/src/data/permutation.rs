//! A random permutation that is computed, not stored.

use crate::random::mix;

/// Enough for the halves of any index to have been mixed into each other many times.
const ROUNDS: u64 = 8;

/// A permutation of `0..len` keyed by two numbers, such as a seed and an epoch.
///
/// A balanced Feistel network over the next even power of two, walked until it lands below `len`: each index
/// is computed alone, in constant memory, with integer arithmetic only, hence the same on every platform.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    len: u64,
    half_bits: u32,
    key: u64,
}

impl Permutation {
    /// The permutation of `0..len` for a key; `len` is at most 2^62.
    pub fn new(len: usize, seed: u64, epoch: u64) -> Self {
        let len = len as u64;
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        Self { len, half_bits: bits.div_ceil(2).max(1), key: mix(mix(seed).wrapping_add(epoch)) }
    }

    /// Where index `i` goes.
    ///
    /// # Panics
    /// `i` is not below the length.
    pub fn at(&self, i: usize) -> usize {
        let mut index = i as u64;
        assert!(index < self.len, "index {i} of a permutation of {}", self.len);
        loop {
            index = self.network(index);
            // The walk stays on the cycle of `i`, which is itself below `len`: it ends.
            if index < self.len {
                return index as usize;
            }
        }
    }

    /// The Feistel network: a bijection of `0..2^(2 * half_bits)`.
    fn network(&self, index: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (index >> self.half_bits, index & mask);
        for round in 0..ROUNDS {
            let keyed = mix(self.key ^ mix(right | (round << 56)));
            (left, right) = (right, left ^ (keyed >> (u64::BITS - self.half_bits)));
        }
        (left << self.half_bits) | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(len: usize, seed: u64, epoch: u64) -> Vec<usize> {
        let permutation = Permutation::new(len, seed, epoch);
        (0..len).map(|i| permutation.at(i)).collect()
    }

    #[test]
    fn every_index_appears_once() {
        for len in [1, 2, 3, 4, 5, 16, 17, 100, 1024, 4097] {
            let mut seen = order(len, 7, 3);
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..len), "length {len}");
        }
    }

    #[test]
    fn small_orders_are_all_reached_about_equally_often() {
        let mut counts = std::collections::BTreeMap::new();
        for seed in 0..6000 {
            *counts.entry(order(3, seed, 0)).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 6);
        assert!(counts.values().all(|n| (800..1200).contains(n)), "{counts:?}");
    }

    #[test]
    fn seed_and_epoch_both_matter() {
        assert_ne!(order(100, 0, 0), order(100, 0, 1));
        assert_ne!(order(100, 0, 0), order(100, 1, 0));
        assert_ne!(order(100, 0, 1), order(100, 1, 0));
    }

    #[test]
    fn golden_orders() {
        assert_eq!(order(10, 0, 0), [8, 6, 1, 2, 9, 0, 4, 7, 5, 3]);
        assert_eq!(order(10, 0, 1), [0, 5, 3, 7, 4, 1, 2, 6, 8, 9]);
        assert_eq!(order(10, 1, 0), [4, 1, 6, 9, 8, 3, 2, 5, 0, 7]);
        let large = Permutation::new(1_000_003, 42, 5);
        assert_eq!([0, 1, 2, 1_000_002].map(|i| large.at(i)), [658424, 361974, 766435, 516422]);
    }
}
