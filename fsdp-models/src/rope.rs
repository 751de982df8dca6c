//! Rotary position embedding (Su et al., 2021): frequencies, their scaling for long sequences, and the tables of angles.

use std::f64::consts::TAU;
use std::sync::{Mutex, PoisonError};

use candle_core::{Device, Result, Tensor, bail};

use crate::config::{LlamaConfig, RopeScaling};

/// Tables of the rotary position embedding: the angles' cosines and sines, f32 `[positions, head_dim / 2]`.
/// No parameters.
#[derive(Clone, Debug)]
pub struct Rope {
    pub(crate) cos: Tensor,
    pub(crate) sin: Tensor,
}

impl Rope {
    /// Position `p` turns pair `j` of a head by `p * theta^(-2j / head_dim)`.
    ///
    /// # Errors
    /// If `head_dim` is odd.
    pub fn new(head_dim: usize, positions: usize, theta: f64) -> Result<Self> {
        check_head_dim(head_dim)?;
        Frequencies { head_dim, theta, pretrained: positions, scaling: None }.tables(positions)
    }

    /// Positions that the tables cover.
    pub fn positions(&self) -> usize {
        self.cos.dims()[0]
    }

    /// The tables of the first `positions` positions: views.
    ///
    /// # Errors
    /// If there are fewer.
    pub fn first(&self, positions: usize) -> Result<Self> {
        if positions > self.positions() {
            bail!("a sequence of {positions} tokens: the tables have {} positions", self.positions());
        }
        Ok(Rope { cos: self.cos.narrow(0, 0, positions)?, sin: self.sin.narrow(0, 0, positions)? })
    }

    /// The tables on `device`.
    ///
    /// # Errors
    /// Those of the device.
    pub fn on(&self, device: &Device) -> Result<Self> {
        Ok(Rope { cos: self.cos.to_device(device)?, sin: self.sin.to_device(device)? })
    }
}

/// By what the scaling of a model divides each of its frequencies.
pub(crate) fn divisors(config: &LlamaConfig) -> Vec<f64> {
    let length = config.max_position_embeddings;
    let (head_dim, theta) = (config.head_dim(), config.rope_theta);
    let of = |scaling| Frequencies { head_dim, theta, pretrained: length, scaling }.of(length);
    let (plain, scaled) = (of(None), of(config.rope_scaling.clone()));
    plain.into_iter().zip(scaled).map(|(plain, scaled)| plain / scaled).collect()
}

fn check_head_dim(head_dim: usize) -> Result<()> {
    if !head_dim.is_multiple_of(2) {
        bail!("rotary tables need an even head dim, not {head_dim}");
    }
    Ok(())
}

/// The rotary tables of a model: as long as the longest sequence so far, on the device where they were last asked for. How
/// many positions a model may have is no reason to make tables for them.
#[derive(Debug)]
pub struct RopeTables {
    frequencies: Frequencies,
    positions: usize,
    made: Mutex<Option<Rope>>,
}

impl RopeTables {
    /// Of a model of at most `positions` positions, without scaling; nothing is computed yet.
    ///
    /// # Errors
    /// If `head_dim` is odd.
    pub fn new(head_dim: usize, positions: usize, theta: f64) -> Result<Self> {
        check_head_dim(head_dim)?;
        let frequencies = Frequencies { head_dim, theta, pretrained: positions, scaling: None };
        Ok(RopeTables { frequencies, positions, made: Mutex::new(None) })
    }

    /// Of the model of a configuration, scaled as it says; nothing is computed yet.
    ///
    /// # Errors
    /// If the head dim is odd.
    pub fn of(config: &LlamaConfig) -> Result<Self> {
        let mut tables = Self::new(config.head_dim(), config.positions(), config.rope_theta)?;
        tables.frequencies.pretrained = config.max_position_embeddings;
        tables.frequencies.scaling = config.rope_scaling.clone();
        Ok(tables)
    }

    /// Most positions of a sequence.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// The tables of the first `positions` positions on `device`. They are made there when a sequence is longer than all before:
    /// a sequence that grows by one token at a time makes them anew each time that it has doubled. Where the frequencies depend on
    /// the length of the sequence, they are made for this length.
    ///
    /// # Errors
    /// If the model has fewer, and those of the device.
    pub fn first(&self, positions: usize, device: &Device) -> Result<Rope> {
        if positions > self.positions {
            bail!("a sequence of {positions} tokens: the model has {} positions", self.positions);
        }
        if self.frequencies.depend_on(positions) {
            return self.frequencies.tables(positions)?.on(device);
        }
        let most = self.frequencies.fixed_up_to().min(self.positions);
        // What a thread that panicked left behind is whole.
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let before = made.as_ref().map_or(0, Rope::positions);
        let there = made.as_ref().is_some_and(|rope| rope.cos.device().same_device(device));
        let rope = match made.take().filter(|_| there && positions <= before) {
            Some(rope) => rope,
            None => {
                let length =
                    if positions <= before { before } else { positions.max(before.saturating_mul(2)) };
                self.frequencies.tables(length.min(most))?.on(device)?
            }
        };
        made.insert(rope).first(positions)
    }
}

/// By how much a position turns each pair of a head.
#[derive(Debug)]
struct Frequencies {
    head_dim: usize,
    theta: f64,
    /// Positions of the configuration, which a scaling may go beyond.
    pretrained: usize,
    scaling: Option<RopeScaling>,
}

impl Frequencies {
    /// Whether a sequence of this length has frequencies of its own.
    fn depend_on(&self, length: usize) -> bool {
        length > self.fixed_up_to()
    }

    /// Sequences up to this length have the same frequencies.
    fn fixed_up_to(&self) -> usize {
        match &self.scaling {
            Some(RopeScaling::Dynamic { .. }) => self.pretrained,
            _ => usize::MAX,
        }
    }

    /// The tables of a sequence of `length` positions.
    fn tables(&self, length: usize) -> Result<Rope> {
        // Frequencies and angles are rounded to f32 as in Hugging Face's Llama.
        let frequencies: Vec<f32> = self.of(length).into_iter().map(|frequency| frequency as f32).collect();
        let angles =
            (0..length).flat_map(|at| frequencies.iter().map(move |frequency| at as f32 * frequency));
        let angles: Vec<f64> = angles.map(f64::from).collect();
        let factor = self.scaling.as_ref().map_or(1.0, RopeScaling::attention_factor);
        let table = |function: fn(f64) -> f64| {
            let values: Vec<f32> = angles.iter().map(|&angle| (function(angle) * factor) as f32).collect();
            Tensor::from_vec(values, (length, frequencies.len()), &Device::Cpu)
        };
        Ok(Rope { cos: table(f64::cos)?, sin: table(f64::sin)? })
    }

    /// In radians a position, one for each pair.
    fn of(&self, length: usize) -> Vec<f64> {
        let dim = self.head_dim as f64;
        let plain = |theta: f64| (0..self.head_dim / 2).map(move |pair| theta.powf(-2.0 * pair as f64 / dim));
        match &self.scaling {
            None => plain(self.theta).collect(),
            Some(RopeScaling::Linear { factor }) => plain(self.theta).map(|f| f / factor).collect(),
            Some(RopeScaling::Dynamic { factor }) => {
                let stretched = length.max(self.pretrained) as f64 / self.pretrained as f64;
                let theta = self.theta * (factor * stretched - (factor - 1.0)).powf(dim / (dim - 2.0));
                plain(theta).collect()
            }
            Some(RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            }) => {
                // How often a pair turns round within the sequences of pretraining: slow pairs are interpolated, fast ones kept.
                let scaled = |f: f64| {
                    let kept = ((*original as f64 * f / TAU - low) / (high - low)).clamp(0.0, 1.0);
                    f * (kept + (1.0 - kept) / factor)
                };
                plain(self.theta).map(scaled).collect()
            }
            Some(RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                truncate,
                original_max_position_embeddings: original,
                ..
            }) => {
                let original = original.unwrap_or(self.pretrained) as f64;
                // The pair that turns round so many times within the sequences of pretraining.
                let pair = |turns: f64| dim * (original / (turns * TAU)).ln() / (2.0 * self.theta.ln());
                let (mut first, mut last) = (pair(*beta_fast), pair(*beta_slow));
                if *truncate {
                    (first, last) = (first.floor(), last.ceil());
                }
                let (first, mut last) = (first.max(0.0), last.min(dim - 1.0));
                if first == last {
                    last += 0.001;
                }
                let scaled = |(pair, f): (usize, f64)| {
                    let interpolated = ((pair as f64 - first) / (last - first)).clamp(0.0, 1.0);
                    f * (1.0 - interpolated + interpolated / factor)
                };
                plain(self.theta).enumerate().map(scaled).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scaled(head_dim: usize, theta: f64, pretrained: usize, scaling: RopeScaling) -> Frequencies {
        Frequencies { head_dim, theta, pretrained, scaling: Some(scaling) }
    }

    fn assert_frequencies(found: &[f64], expected: &[(usize, f64)]) {
        for &(pair, expected) in expected {
            assert!((found[pair] - expected).abs() <= 1e-8 * expected, "{pair}: {} {expected}", found[pair]);
        }
    }

    #[test]
    fn rotary_angles_are_position_times_frequency() {
        let rope = Rope::new(4, 3, 10_000.0).unwrap();
        let cos: Vec<Vec<f32>> = rope.cos.to_vec2().unwrap();
        let sin: Vec<Vec<f32>> = rope.sin.to_vec2().unwrap();
        for (at, (cos, sin)) in cos.iter().zip(&sin).enumerate() {
            for (pair, frequency) in [1.0f32, 0.01].into_iter().enumerate() {
                let angle = f64::from(at as f32 * frequency);
                assert_eq!((cos[pair], sin[pair]), (angle.cos() as f32, angle.sin() as f32));
            }
        }
        assert_eq!(rope.first(2).unwrap().positions(), 2);
    }

    #[test]
    fn tables_are_as_long_as_the_longest_sequence_and_no_longer() {
        let positions = usize::MAX;
        let tables = RopeTables::new(4, positions, 10_000.0).unwrap();
        let made = || tables.made.lock().unwrap().as_ref().map_or(0, Rope::positions);
        assert_eq!((tables.positions(), made()), (positions, 0));
        for (asked, expected) in [(3, 3), (2, 3), (4, 6), (6, 6), (7, 12), (40, 40)] {
            let rope = tables.first(asked, &Device::Cpu).unwrap();
            assert_eq!((rope.positions(), made()), (asked, expected));
            // The same, however long the tables are.
            let alone = Rope::new(4, asked, 10_000.0).unwrap();
            for (ours, theirs) in [(rope.cos, alone.cos), (rope.sin, alone.sin)] {
                assert_eq!(ours.to_vec2::<f32>().unwrap(), theirs.to_vec2::<f32>().unwrap());
            }
        }
        let short = RopeTables::new(4, 5, 10_000.0).unwrap();
        for asked in [4, 5] {
            assert_eq!(short.first(asked, &Device::Cpu).unwrap().positions(), asked);
        }
        assert!(short.first(6, &Device::Cpu).is_err());
    }

    #[test]
    fn too_long_a_sequence_and_an_odd_head_are_refused() {
        let message = RopeTables::new(4, 3, 1e4).unwrap().first(4, &Device::Cpu).unwrap_err().to_string();
        assert!(message.starts_with("a sequence of 4 tokens: the model has 3 positions"), "{message}");
        assert!(Rope::new(5, 3, 1e4).is_err() && RopeTables::new(5, 3, 1e4).is_err());
    }

    // The expected frequencies are computed in Python, in terms of wave lengths, as `transformers` does.

    /// Llama 3.2: pairs 0 to 14 are kept, 15 to 17 interpolated, the rest divided.
    #[test]
    fn slow_frequencies_of_llama_3_are_divided() {
        let scaling = RopeScaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        let expected = [
            (0, 1.0),
            (14, 3.211445995e-03),
            (15, 1.290547928e-03),
            (16, 4.295567966e-04),
            (17, 9.708287803e-05),
            (18, 1.946163818e-05),
            (31, 9.418306725e-08),
        ];
        assert_frequencies(&scaled(64, 5e5, 131_072, scaling).of(4), &expected);
    }

    #[test]
    fn yarn_interpolates_between_divided_and_kept_frequencies() {
        let yarn = |truncate| RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate,
            attention_factor: None,
            original_max_position_embeddings: Some(32_768),
        };
        let ends = [(0, 1.0), (8, 3.162277660e-02), (24, 7.905694150e-06), (31, 3.849816315e-07)];
        for (truncate, between) in [
            (true, [(13, 3.043117727e-03), (16, 5.833333333e-04)]),
            (false, [(13, 3.241634736e-03), (16, 6.074079379e-04)]),
        ] {
            let found = scaled(64, 1e6, 131_072, yarn(truncate)).of(4);
            assert_frequencies(&found, &ends);
            assert_frequencies(&found, &between);
        }
        // Of position 0 the cosine is 1.
        let tables = scaled(64, 1e6, 131_072, yarn(true)).tables(1).unwrap();
        let first = tables.cos.to_vec2::<f32>().unwrap()[0][5];
        assert!((first - 1.138_629_4).abs() < 1e-6, "{first}");
    }

    #[test]
    fn linear_scaling_divides_all_frequencies() {
        let found = scaled(4, 1e4, 64, RopeScaling::Linear { factor: 4.0 }).of(8);
        assert_frequencies(&found, &[(0, 0.25), (1, 0.0025)]);
        // In the model of a configuration that says so.
        let config: LlamaConfig = serde_json::from_str(
            r#"{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8,
                "rope_scaling": {"type": "linear", "factor": 4.0}}"#,
        )
        .unwrap();
        let tables = RopeTables::of(&config).unwrap().first(3, &Device::Cpu).unwrap();
        assert_eq!(tables.sin.to_vec2::<f32>().unwrap()[2], [0.5f64.sin() as f32, 0.005f32.sin()]);
    }

    #[test]
    fn dynamic_scaling_depends_on_the_length_of_long_sequences_alone() {
        let dynamic = || RopeScaling::Dynamic { factor: 2.0 };
        let frequencies = scaled(16, 1e4, 64, dynamic());
        assert_eq!(frequencies.of(64), Frequencies { scaling: None, ..scaled(16, 1e4, 64, dynamic()) }.of(9));
        let expected = [(0, 1.0), (1, 2.864149710e-01), (4, 6.729500963e-03), (7, 1.581138830e-04)];
        assert_frequencies(&frequencies.of(96), &expected);

        let tables = RopeTables { frequencies, positions: 128, made: Mutex::new(None) };
        let of = |positions| tables.first(positions, &Device::Cpu).unwrap().cos.to_vec2::<f32>().unwrap();
        let (short, long, longer) = (of(40), of(96), of(128));
        // A shorter sequence after a longer one has its own frequencies again.
        assert_eq!((of(40), of(64)[..40].to_vec()), (short.clone(), short.clone()));
        assert!(long[..40] != short[..] && longer[..96] != long[..]);
        assert!(tables.first(129, &Device::Cpu).is_err());
    }
}
