//! Counter-based random numbers: a value depends on a key and a position, and on nothing that was drawn before.
//!
//! So a rank can draw the part it needs alone, recomputation draws the same again, and neither the number of ranks
//! nor the order in which units run matters. The generator is ChaCha with 8 rounds.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// Names one stream of random words of a forward, the same in recomputation, and tells which samples this rank
/// has. Made by [`Scope::random_stream`](crate::Scope::random_stream).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomStream {
    key: u64,
    first_sample: u64,
}

impl RandomStream {
    /// The stream of `key` for samples from `first_sample` on.
    pub(crate) fn new(key: u64, first_sample: u64) -> Self {
        RandomStream { key, first_sample }
    }

    /// What names it, whoever draws from it: its words are those of ChaCha with 8 rounds, from block 0 on, whose key is
    /// the first two outputs of SplitMix64 of this number and then those of the sample's global index.
    pub fn key(&self) -> u64 {
        self.key
    }

    /// Global index of the first sample of this rank's batch.
    pub fn first_sample(&self) -> u64 {
        self.first_sample
    }

    /// Writes uniform 32-bit words for one sample of this rank's batch, the `sample`-th: they depend on the
    /// sample's global index, not on the rank that has it.
    pub fn fill(&self, sample: u64, words: &mut [u32]) {
        let sample = self.first_sample.wrapping_add(sample);
        let mut stream = Words::numbered(self.key, sample);
        words.iter_mut().for_each(|word| *word = stream.next());
    }
}

/// What the random numbers of one call of a module depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RandomKey {
    pub key: u64,
    /// Global index of the first sample of this rank's batch.
    pub first_sample: u64,
}

impl RandomKey {
    /// That of the root's forward in an optimizer step.
    pub(crate) fn root(seed: u64, step: u64, first_sample: u64) -> Self {
        RandomKey { key: mix(seed, step), first_sample }
    }

    /// That of the `draw`-th thing that a call does: a unit it calls, a stream it draws from.
    pub(crate) fn of(self, draw: u64) -> Self {
        RandomKey { key: mix(self.key, draw), ..self }
    }
}

/// A stream of 32-bit words.
pub(crate) struct Words(ChaCha8Rng);

impl Words {
    /// That of a name.
    pub(crate) fn named(seed: u64, name: &str) -> Self {
        Words::of(seed, fnv1a(name.as_bytes()))
    }

    /// That of a number.
    fn numbered(key: u64, number: u64) -> Self {
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

    pub(crate) fn seek(&mut self, word: u64) {
        self.0.set_word_pos(u128::from(word));
    }

    pub(crate) fn next(&mut self) -> u32 {
        self.0.next_u32()
    }
}

/// A key that depends on both.
fn mix(key: u64, number: u64) -> u64 {
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

    #[test]
    fn a_sample_has_its_words_whatever_the_batch_it_is_in() {
        let words = |first: u64, sample: u64| {
            let mut words = [0; 9];
            RandomStream::new(7, first).fill(sample, &mut words);
            words
        };
        assert_eq!(words(0, 5), words(3, 2));
        assert_ne!(words(0, 5), words(0, 6));
        assert_ne!(words(0, 5)[0], words(0, 5)[1]);
    }

    #[test]
    fn keys_differ_by_seed_step_and_draw() {
        let root = RandomKey::root(1, 2, 0);
        let keys = [
            root.key,
            RandomKey::root(2, 1, 0).key,
            RandomKey::root(1, 3, 0).key,
            root.of(0).key,
            root.of(1).key,
            root.of(0).of(1).key,
            root.of(1).of(0).key,
        ];
        assert!((0..keys.len()).all(|i| !keys[..i].contains(&keys[i])), "{keys:x?}");
    }
}
