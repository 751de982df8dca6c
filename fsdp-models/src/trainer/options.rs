//! Options of a training run.

use fsdp::FsdpConfig;
use fsdp::optim::{AdamW, CosineSchedule, Optimizer};

use super::TrainDevice;
use crate::config::LlamaConfig;
use crate::data::{Batches, Part};
pub use crate::error::TrainError;
use crate::product::product;

/// Most tokens of a rank's microbatch: with more, the activations of the smallest model would fill a machine.
const MAX_TOKENS: usize = 1 << 26;

/// Most microbatches of a rank in a step.
const MAX_MICROBATCHES: usize = 1 << 20;

/// Largest learning rate and weight decay: AdamW moves every weight by about as much as its rate, each step.
const MAX_RATE: f64 = 1e3;

/// Settings of a training run. The same on all ranks.
#[derive(Clone, Debug)]
pub struct TrainOptions {
    /// The model.
    pub model: LlamaConfig,
    /// How it is sharded, its dtypes, and the seed of its weights.
    pub fsdp: FsdpConfig,
    /// What the ranks compute on.
    pub device: TrainDevice,
    /// Replicas of the sharded model: the size of `dp_outer`, a divisor of the number of ranks.
    pub outer_ranks: usize,
    /// Optimizer steps.
    pub steps: usize,
    /// Forwards and backwards of each rank in one step.
    pub microbatches: usize,
    /// Learning rate; with a warm-up, its highest value.
    pub lr: f64,
    /// Steps of linear warm-up, after which the rate falls to a tenth along half a cosine; `None` for a
    /// constant rate.
    pub warmup: Option<usize>,
    /// Decoupled weight decay, of every parameter.
    pub weight_decay: f64,
    /// Largest global gradient norm; `None` for no clipping.
    pub clip: Option<f64>,
}

impl TrainOptions {
    /// `steps` steps of a model with AdamW at 1e-3, weight decay 0.1, clipping at 1, one microbatch, FP32,
    /// fully sharded, on the CPU.
    pub fn new(model: LlamaConfig, steps: usize) -> Self {
        TrainOptions {
            model,
            fsdp: FsdpConfig::default(),
            device: TrainDevice::Cpu,
            outer_ranks: 1,
            steps,
            microbatches: 1,
            lr: 1e-3,
            warmup: None,
            weight_decay: 0.1,
            clip: Some(1.0),
        }
    }

    /// The update rule: AdamW with betas 0.9 and 0.95.
    pub fn optimizer(&self) -> AdamW {
        AdamW::default().lr(self.lr).betas(0.9, 0.95).eps(1e-8).weight_decay(self.weight_decay)
    }

    /// Learning rate of step `step`, counted from 0.
    pub fn learning_rate(&self, step: usize) -> f64 {
        self.schedule().map_or(self.lr, |schedule| schedule.lr(step as u64 + 1))
    }

    fn schedule(&self) -> Option<CosineSchedule> {
        let warmup = self.warmup? as u64;
        Some(CosineSchedule { warmup, total: self.steps as u64, peak: self.lr, min: self.lr / 10.0 })
    }

    /// Checks all that can be known before ranks are started: the model, the device, the optimizer, and that `data` can
    /// serve the run on `ranks` ranks from its beginning.
    ///
    /// # Errors
    /// The first rule that is broken, with its numbers.
    pub fn validate(&self, ranks: usize, data: &dyn Batches) -> crate::Result<()> {
        self.model.validate()?;
        self.device.check()?;
        let positive = [
            ("steps", self.steps),
            ("ranks", ranks),
            ("microbatches", self.microbatches),
            ("outer ranks", self.outer_ranks),
        ];
        for (option, value) in positive {
            if value == 0 {
                return Err(TrainError::Zero { option }.into());
            }
        }
        if let Some(clip) = self.clip.filter(|clip| clip.is_nan() || *clip <= 0.0) {
            return Err(TrainError::Clip { clip }.into());
        }
        let outer_ranks = self.outer_ranks;
        if !ranks.is_multiple_of(outer_ranks) {
            return Err(TrainError::OuterRanks { ranks, outer_ranks }.into());
        }
        self.optimizer().validate().map_err(fsdp::Error::from)?;
        for (option, value) in [("lr", self.lr), ("weight decay", self.weight_decay)] {
            if value > MAX_RATE {
                return Err(TrainError::TooLarge { option, value, most: MAX_RATE }.into());
            }
        }
        if let Some(warmup) = self.warmup.filter(|&warmup| warmup > self.steps) {
            return Err(TrainError::Warmup { warmup, steps: self.steps }.into());
        }
        if let Some(schedule) = self.schedule() {
            schedule.validate().map_err(fsdp::Error::from)?;
        }
        let (seq, positions) = (data.seq(), self.model.positions());
        if seq > positions {
            return Err(TrainError::SequenceTooLong { seq, positions }.into());
        }
        let part = Part { rank: 0, world: ranks, microbatch: 0, microbatches: self.microbatches };
        let rows = part.rows(data.rows())?.len();
        let tokens = [("sequences", rows), ("length", seq)];
        product("tokens in a microbatch of a rank", &tokens, MAX_TOKENS).map_err(TrainError::from)?;
        product("microbatches", &[("microbatches", self.microbatches)], MAX_MICROBATCHES)
            .map_err(TrainError::from)?;
        Ok(data.check_steps(0, self.steps)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{TextDataset, TextOptions};

    fn options() -> TrainOptions {
        let model = r#"{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "vocab_size": 256, "max_position_embeddings": 16}"#;
        TrainOptions::new(serde_json::from_str(model).unwrap(), 10)
    }

    fn data(seq: usize) -> TextDataset {
        let order = TextOptions { seq, batch: 8, vocab: 256, seed: 0 };
        TextDataset::from_bytes(vec![b'x'; 100], order).unwrap()
    }

    #[test]
    fn the_rate_is_constant_without_a_warm_up() {
        let rates = |options: &TrainOptions| [0, 1, 9].map(|step| options.learning_rate(step));
        assert_eq!(rates(&options()), [1e-3; 3]);
        assert_eq!(rates(&TrainOptions { warmup: Some(2), ..options() }), [5e-4, 1e-3, 1e-4]);
    }

    #[test]
    fn what_cannot_be_trained_is_refused_with_its_numbers() {
        let refusal = |ranks, seq, options: TrainOptions| {
            options.validate(ranks, &data(seq)).expect_err("refused").to_string()
        };
        options().validate(8, &data(16)).unwrap();
        assert_eq!(refusal(0, 16, options()), "ranks is 0: it must be at least 1");
        let none = TrainOptions { microbatches: 0, ..options() };
        assert_eq!(refusal(1, 16, none), "microbatches is 0: it must be at least 1");
        assert_eq!(
            refusal(1, 17, options()),
            "a sequence of 17 tokens is too long for a model of 16 positions"
        );
        let thrice = TrainOptions { microbatches: 3, ..options() };
        assert!(refusal(2, 16, thrice).contains("it must be a positive multiple of 6"));
        let clip = TrainOptions { clip: Some(-1.0), ..options() };
        assert_eq!(refusal(1, 16, clip), "the largest gradient norm must be positive, not -1");
        let negative = TrainOptions { lr: -1.0, ..options() };
        assert_eq!(refusal(1, 16, negative), "adamw: lr must be finite and at least 0, got -1");
        let long = TrainOptions { warmup: Some(11), ..options() };
        assert_eq!(refusal(1, 16, long), "warmup is 11 steps: it must be at most the 10 steps of the run");
        for lr in [1e4, 1e30, 1e308] {
            let expected = format!("lr is {lr:e}: it must be at most 1000");
            assert_eq!(refusal(1, 16, TrainOptions { lr, ..options() }), expected);
        }
        let decay = TrainOptions { weight_decay: 1e308, ..options() };
        assert_eq!(refusal(1, 16, decay), "weight decay is 1e308: it must be at most 1000");
    }

    #[test]
    fn more_tokens_than_a_rank_can_hold_are_refused_with_their_factors() {
        let refusal = |batch, options: TrainOptions| {
            let order = TextOptions { seq: 16, batch, vocab: 256, seed: 0 };
            let data = TextDataset::from_bytes(vec![b'x'; 100], order).unwrap();
            options.validate(2, &data).expect_err("refused").to_string()
        };
        assert_eq!(
            refusal(1 << 24, options()),
            "too many tokens in a microbatch of a rank: sequences 8388608 x length 16, expected at most 67108864"
        );
        let thin = TrainOptions { microbatches: 1 << 22, ..options() };
        assert_eq!(
            refusal(1 << 23, thin),
            "too many microbatches: microbatches 4194304, expected at most 1048576"
        );
    }
}
