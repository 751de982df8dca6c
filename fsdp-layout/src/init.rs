//! Initial values from a counter-based generator keyed by (seed, tensor name, element index).
//!
//! The tensors are those that checkpoints know: a parameter, or each part of a fused one, so that a fused model
//! starts as an unfused one does.
//!
//! The value of an element depends on nothing else: not on the number of ranks, the strategy, the layout or
//! the other parameters. So each rank fills its own shard alone, and all world sizes start from the same
//! model.
//!
//! The stream of a tensor is ChaCha with 8 rounds. Its 256-bit key is four little-endian 64-bit words: the
//! first two outputs of SplitMix64 seeded by the seed, then the first two of SplitMix64 seeded by the 64-bit
//! FNV-1a hash of the name's bytes. Element `i` uses 32-bit word `i` of the stream. Uniform values take its
//! upper 24 bits. Normal values are Box-Muller pairs of the words `2k` (radius) and `2k + 1` (angle),
//! computed in f64: element `2k` is the cosine, `2k + 1` the sine. This is part of the contract: a change
//! would change every model trained from a given seed.

use std::f64::consts::TAU;
use std::ops::Range;

use crate::random::Words;

/// Initial value of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All elements the same.
    Constant(f32),
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// Normal distribution.
    Normal {
        /// Mean.
        mean: f32,
        /// Standard deviation.
        std: f32,
    },
    /// Uniform in `[low, high)`.
    Uniform {
        /// Smallest value.
        low: f32,
        /// Upper bound, excluded.
        high: f32,
    },
}

impl Init {
    /// What is wrong with its numbers, if anything.
    pub fn check(&self) -> Option<&'static str> {
        let (first, second) = match *self {
            Init::Zeros | Init::Ones => (0.0, 0.0),
            Init::Constant(value) => (value, 0.0),
            Init::Normal { mean, std } => (mean, std),
            Init::Uniform { low, high } => (low, high),
        };
        match *self {
            _ if !(first.is_finite() && second.is_finite()) => Some("is not finite"),
            Init::Normal { std, .. } if std < 0.0 => Some("has a negative standard deviation"),
            Init::Uniform { low, high } if low > high => Some("has its lower bound above its upper one"),
            _ => None,
        }
    }

    /// Writes the values of the elements `range` of the flattened tensor `name` to `out`.
    ///
    /// # Panics
    /// If `range` and `out` differ in length.
    pub fn fill(&self, seed: u64, name: &str, range: Range<u64>, out: &mut [f32]) {
        assert_eq!(range.end.saturating_sub(range.start), out.len() as u64, "elements of `{name}` to fill");
        match *self {
            Init::Constant(value) => out.fill(value),
            Init::Zeros => out.fill(0.0),
            Init::Ones => out.fill(1.0),
            Init::Normal { mean, std } => normal(Words::named(seed, name), mean, std, range.start, out),
            Init::Uniform { low, high } => {
                let mut words = Words::named(seed, name);
                words.seek(range.start);
                let (low64, width) = (f64::from(low), f64::from(high) - f64::from(low));
                let below_high = high.next_down().max(low);
                for value in out {
                    let unit = f64::from(words.next() >> 8) / f64::from(1u32 << 24);
                    *value = ((low64 + width * unit) as f32).min(below_high);
                }
            }
        }
    }
}

fn normal(mut words: Words, mean: f32, std: f32, start: u64, out: &mut [f32]) {
    let (mean, std) = (f64::from(mean), f64::from(std));
    let odd = start % 2 == 1;
    words.seek(start - u64::from(odd));
    let mut pair = || {
        // In (0, 1], so that the logarithm is finite.
        let radius = (f64::from(words.next()) + 1.0) / 4_294_967_296.0;
        let angle = f64::from(words.next()) / 4_294_967_296.0;
        let scale = std * (-2.0 * radius.ln()).sqrt();
        let (sin, cos) = (TAU * angle).sin_cos();
        [(mean + scale * cos) as f32, (mean + scale * sin) as f32]
    };
    let (head, rest) = out.split_at_mut(usize::from(odd).min(out.len()));
    if let [value] = head {
        *value = pair()[1];
    }
    for values in rest.chunks_mut(2) {
        values.copy_from_slice(&pair()[..values.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NORMAL: Init = Init::Normal { mean: 0.0, std: 0.02 };
    const UNIFORM: Init = Init::Uniform { low: -0.5, high: 1.5 };

    fn filled(init: &Init, seed: u64, name: &str, range: Range<u64>) -> Vec<f32> {
        let mut out = vec![f32::NAN; (range.end - range.start) as usize];
        init.fill(seed, name, range, &mut out);
        out
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    fn mean_and_std(values: &[f32]) -> (f64, f64) {
        let n = values.len() as f64;
        let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        let variance = values.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n;
        (mean, variance.sqrt())
    }

    #[test]
    fn ranges_in_sequence_equal_the_whole() {
        for init in [NORMAL, UNIFORM, Init::Ones] {
            let whole = filled(&init, 7, "model.norm.weight", 0..1000);
            for cuts in [vec![0, 1000], vec![0, 1, 2, 5, 5, 64, 65, 333, 999, 1000], vec![0, 16, 32, 1000]] {
                let parts: Vec<f32> = cuts
                    .windows(2)
                    .flat_map(|cut| filled(&init, 7, "model.norm.weight", cut[0]..cut[1]))
                    .collect();
                assert_eq!(bits(&parts), bits(&whole));
            }
        }
    }

    #[test]
    fn elements_above_2_to_the_32_have_their_own_values() {
        let far = (1u64 << 40) + 1;
        let whole = filled(&NORMAL, 7, "w", far..far + 8);
        assert_eq!(bits(&whole[3..]), bits(&filled(&NORMAL, 7, "w", far + 3..far + 8)));
        assert_ne!(bits(&whole), bits(&filled(&NORMAL, 7, "w", 1..9)));
    }

    #[test]
    fn normal_has_its_mean_and_deviation() {
        let values = filled(&Init::Normal { mean: 0.5, std: 2.0 }, 1, "w", 0..1_000_000);
        let (mean, std) = mean_and_std(&values);
        // Five standard errors.
        assert!((mean - 0.5).abs() < 5.0 * 2.0 / 1e3, "{mean}");
        assert!((std - 2.0).abs() < 5.0 * 2.0 / 1.41e3, "{std}");
        let within = |sigmas: f64| {
            values.iter().filter(|&&v| (f64::from(v) - 0.5).abs() < 2.0 * sigmas).count() as f64 / 1e6
        };
        assert!((within(1.0) - 0.682_689).abs() < 0.0025);
        assert!((within(2.0) - 0.954_500).abs() < 0.0011);
    }

    #[test]
    fn uniform_is_in_its_interval() {
        let values = filled(&UNIFORM, 1, "w", 0..1_000_000);
        let (mean, std) = mean_and_std(&values);
        assert!(values.iter().all(|&v| (-0.5..1.5).contains(&v)));
        assert!((mean - 0.5).abs() < 5.0 * 0.578 / 1e3, "{mean}");
        assert!((std - 2.0 / 12f64.sqrt()).abs() < 0.002, "{std}");
        // A width below what f32 resolves at `low` must still exclude `high`.
        let narrow = Init::Uniform { low: 1.0, high: 1.0 + f32::EPSILON };
        assert!(filled(&narrow, 1, "w", 0..1000).iter().all(|&v| v == 1.0));
    }

    #[test]
    fn seed_and_name_each_change_the_values() {
        let base = filled(&NORMAL, 7, "layers.0.w", 0..16);
        assert_ne!(base, filled(&NORMAL, 8, "layers.0.w", 0..16));
        assert_ne!(base, filled(&NORMAL, 7, "layers.1.w", 0..16));
    }

    #[test]
    fn values_of_a_seed_never_change() {
        let normal = filled(&NORMAL, 42, "model.layers.0.mlp.up_proj.weight", 0..3);
        assert_eq!(bits(&normal), [0x3b7e_f119, 0x3c14_1eb6, 0x39a6_909f]);
        let uniform = filled(&UNIFORM, 42, "model.layers.0.mlp.up_proj.weight", 0..3);
        assert_eq!(bits(&uniform), [0x3fa2_ce79, 0xbe04_72e8, 0x3fbe_0af3]);
    }
}
