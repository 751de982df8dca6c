//! Counter-based random numbers: a value depends on a key and a position, and on nothing that was drawn before.
//!
//! So a rank can draw the part it needs alone, and neither the number of ranks nor the order of what is drawn matters. The
//! generator is ChaCha with 8 rounds.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// A stream of 32-bit words.
#[derive(Debug)]
pub struct Words(ChaCha8Rng);

impl Words {
    /// That of a name.
    pub fn named(seed: u64, name: &str) -> Self {
        Words::of(seed, fnv1a(name.as_bytes()))
    }

    /// That of a number.
    pub fn numbered(key: u64, number: u64) -> Self {
        Words::of(key, number)
    }

    fn of(first: u64, second: u64) -> Self {
        let mut key = [0; 32];
        let [a, b] = splitmix64(first);
        let [c, d] = splitmix64(second);
        for (bytes, word) in key.chunks_exact_mut(8).zip([a, b, c, d]) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        Words(ChaCha8Rng::from_seed(key))
    }

    /// Goes to the `word`-th word.
    pub fn seek(&mut self, word: u64) {
        self.0.set_word_pos(u128::from(word));
    }

    /// The next word.
    #[expect(clippy::should_implement_trait, reason = "a stream of words has no end")]
    pub fn next(&mut self) -> u32 {
        self.0.next_u32()
    }
}

/// A key that depends on both.
pub fn mix(key: u64, number: u64) -> u64 {
    splitmix64(key.rotate_left(32) ^ splitmix64(number)[0])[1]
}

/// 64-bit FNV-1a.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The first two outputs of SplitMix64.
fn splitmix64(seed: u64) -> [u64; 2] {
    [1u64, 2].map(|step| {
        let mut z = seed.wrapping_add(step.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_the_published_ones() {
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
        assert_eq!(splitmix64(0), [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4]);
    }
}
