//! Digests of a parameter's values, to notice a change.

use crate::device::Slice;

/// How much of a parameter is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Thoroughness {
    /// Every element.
    All,
    /// A few elements, others for each number. What is small is looked at as a whole.
    Sample(u64),
}

impl Thoroughness {
    /// That of a parameter in the use of this number: every element in one of [`TURNS`], in others a few.
    pub(crate) fn by_turns(number: u64, param: usize) -> Thoroughness {
        if mixed(number ^ mixed(param as u64)).is_multiple_of(TURNS) {
            Thoroughness::All
        } else {
            Thoroughness::Sample(number)
        }
    }
}

/// A checksum of a parameter's values. Memory of a device is not looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Digest {
    how: Thoroughness,
    sum: u64,
}

/// Uses of a unit of which one, on average, looks at all of a parameter.
const TURNS: u64 = 64;
/// Elements in a sample.
const SAMPLE: u64 = 32;
/// Bytes up to which every element is looked at.
const SMALL: usize = 1 << 10;

impl Digest {
    /// Of memory that nothing writes meanwhile.
    pub(super) fn of(slice: &Slice, how: Thoroughness) -> Digest {
        if !slice.is_host() {
            return Digest { how, sum: 0 };
        }
        // SAFETY: the unit is the caller's, acquired from the gather pipeline and not yet released, and its tensors have
        // either not got the memory yet or have given it back.
        let bytes = unsafe { slice.as_bytes() };
        let sum = match how {
            Thoroughness::Sample(number) if bytes.len() > SMALL => {
                let (size, len) = (slice.dtype().size(), slice.len() as u64);
                (0..SAMPLE).fold(number, |sum, index| {
                    let at = (mixed(number.wrapping_mul(SAMPLE).wrapping_add(index)) % len) as usize * size;
                    bytes[at..at + size].iter().fold(sum, |sum, &byte| step(sum, u64::from(byte)))
                })
            }
            _ => whole(bytes),
        };
        Digest { how, sum }
    }

    /// That of the same elements now.
    pub(super) fn again(&self, slice: &Slice) -> Digest {
        Digest::of(slice, self.how)
    }
}

/// One to one in `word`, so that no single change is missed.
fn step(sum: u64, word: u64) -> u64 {
    (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}

fn whole(bytes: &[u8]) -> u64 {
    // Several chains, as one would wait for its multiplications.
    let mut sums = [1u64, 2, 3, 4];
    let mut chunks = bytes.chunks_exact(32);
    for chunk in chunks.by_ref() {
        for (sum, word) in sums.iter_mut().zip(chunk.chunks_exact(8)) {
            *sum = step(*sum, u64::from_le_bytes(word.try_into().expect("8 bytes")));
        }
    }
    let rest = chunks.remainder().iter().fold(0, |sum, &byte| step(sum, u64::from(byte)));
    sums.into_iter().fold(rest, step)
}

/// SplitMix64's finaliser: numbers far apart for neighbours.
fn mixed(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Dtype;

    /// 5,003 elements, each its index.
    fn slice() -> Slice {
        // SAFETY: the buffer is new and the test's alone.
        unsafe {
            let slice = Slice::zeros(Dtype::F32, 5003, None);
            slice
                .as_mut_slice::<f32>()
                .iter_mut()
                .enumerate()
                .for_each(|(index, value)| *value = index as f32);
            slice
        }
    }

    #[test]
    fn every_single_change_is_found_when_all_is_looked_at() {
        let slice = slice();
        let digest = Digest::of(&slice, Thoroughness::All);
        for index in [0, 1, 7, 8, 2500, 4999, 5002] {
            // SAFETY: the buffer is the test's alone.
            let values = unsafe { slice.as_mut_slice::<f32>() };
            let before = std::mem::replace(&mut values[index], -1.0);
            assert_ne!(digest, digest.again(&slice), "{index}");
            // SAFETY: as above.
            unsafe { slice.as_mut_slice::<f32>()[index] = before };
            assert_eq!(digest, digest.again(&slice));
        }
    }

    #[test]
    fn each_parameter_is_looked_at_whole_in_one_use_of_64() {
        // Models of so many units, whose passes enter them in order; unit `u` has parameter `u`.
        for units in [1, 2, 32, 61, 64] {
            for unit in 0..units {
                let number = |pass: u64| pass * units as u64 + unit as u64;
                let whole = (0..6400).map(number).map(|number| Thoroughness::by_turns(number, unit));
                let whole = whole.filter(|how| *how == Thoroughness::All).count();
                // 100 expected, with a deviation of 10.
                assert!((50..150).contains(&whole), "{unit} of {units}: {whole}");
            }
        }
    }

    #[test]
    fn samples_find_a_change_of_all_elements_and_sooner_or_later_one_of_a_few() {
        let slice = slice();
        let of = |number| Digest::of(&slice, Thoroughness::Sample(number));
        let before: Vec<Digest> = (0..1000).map(of).collect();
        // SAFETY: the buffer is the test's alone.
        unsafe { slice.as_mut_slice::<f32>()[4321] = -1.0 };
        let found = (0..1000).filter(|&number| of(number) != before[number as usize]).count();
        // 1,000 samples of 32 among 5,003 elements: 6.4 expected.
        assert!((1..20).contains(&found), "{found}");
        // SAFETY: as above.
        unsafe { slice.as_mut_slice::<f32>() }.iter_mut().for_each(|value| *value += 0.5);
        assert!((0..1000).all(|number| of(number) != before[number as usize]));
    }
}
