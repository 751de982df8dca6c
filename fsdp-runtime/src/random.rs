//! The random numbers of a forward: a value depends on a key and a position, and on nothing that was drawn before.
//!
//! So a rank draws only the part that it needs, a recomputation draws the same numbers again, and neither the number of ranks nor the
//! order of units matters. The generator is ChaCha with 8 rounds. The hashes of its keys are written here by hand: initial
//! values must not change with the version of a crate.

use fsdp_layout::random::{Words, mix};

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

#[cfg(test)]
mod tests {
    use super::*;

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
