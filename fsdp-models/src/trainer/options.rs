//! Options of a training run.

use std::path::PathBuf;

use fsdp::FsdpConfig;
use fsdp::optim::{AdamW, CosineSchedule, Optimizer};

use super::TrainDevice;
use crate::config::LlamaConfig;
use crate::data::{Batches, Part};
use crate::pretrained::Identity;
use crate::product::{TooMany, product};

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
        let (seq, positions) = (data.seq(), self.model.max_position_embeddings);
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

/// Why a training run is refused or ends early.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// A number that must be positive.
    #[error("{option} is 0: it must be at least 1")]
    Zero {
        /// Which option.
        option: &'static str,
    },
    /// CUDA was asked of a program that has none.
    #[error("this program was built without CUDA: build it with `--features cuda`")]
    BuiltWithoutCuda,
    /// CUDA was asked of a machine without a GPU, or where none is visible.
    #[error("there is no CUDA device, or none that this process may see")]
    NoCudaDevice,
    /// A limit of the gradient norm that clips everything.
    #[error("the largest gradient norm must be positive, not {clip}")]
    Clip {
        /// The limit.
        clip: f64,
    },
    /// The ranks cannot be arranged in so many replicas.
    #[error(
        "{ranks} ranks cannot be {outer_ranks} replicas of a sharded model: {outer_ranks} does not divide {ranks}"
    )]
    OuterRanks {
        /// Number of ranks.
        ranks: usize,
        /// Replicas.
        outer_ranks: usize,
    },
    /// The data's sequences are longer than the model's.
    #[error("a sequence of {seq} tokens is too long for a model of max_position_embeddings {positions}")]
    SequenceTooLong {
        /// Tokens of a sequence.
        seq: usize,
        /// Positions of the model.
        positions: usize,
    },
    /// Sizes that nothing can be trained with.
    #[error(transparent)]
    TooMany(#[from] TooMany),
    /// A number that is no setting of a run.
    #[error("{option} is {value:e}: it must be at most {most}")]
    TooLarge {
        /// Which option.
        option: &'static str,
        /// Its value.
        value: f64,
        /// The largest one.
        most: f64,
    },
    /// More steps of warm-up than there are.
    #[error("warmup is {warmup} steps: it must be at most the {steps} steps of the run")]
    Warmup {
        /// Steps of warm-up.
        warmup: usize,
        /// Steps in all.
        steps: usize,
    },
    /// Ctrl-C cannot be waited for.
    #[error("cannot wait for Ctrl-C: {reason}")]
    Signals {
        /// Why.
        reason: String,
    },
    /// A run would be mixed with another.
    #[error(
        "`{}` has checkpoints of a run already, the latest is `{}`: resume it, or give another directory",
        .directory.display(), .latest.display()
    )]
    HasCheckpoints {
        /// The directory.
        directory: PathBuf,
        /// Its latest checkpoint.
        latest: PathBuf,
    },
    /// There is no run to go on with.
    #[error("there is no run to resume: `{}` is not a directory", .directory.display())]
    NothingToResume {
        /// Where its checkpoints should be.
        directory: PathBuf,
    },
    /// The tensors would fit, but what is trained was trained beside others.
    #[error("the run began with {}, it is given {}: give the same pretrained model", base(.before), base(.now))]
    OtherBase {
        /// What a checkpoint says.
        before: Option<Identity>,
        /// What is given now.
        now: Option<Identity>,
    },
    /// The tensors would fit, the arithmetic would not.
    #[error(
        "the run was trained with {}, the model has {}: give the same alpha and rank", adapters(.before), adapters(.now)
    )]
    OtherAdapters {
        /// `alpha / rank` in the checkpoint.
        before: Option<f64>,
        /// `alpha / rank` of the model.
        now: Option<f64>,
    },
    /// The loss is a NaN or an infinity.
    #[error("the loss of step {step} is {loss}; the weights are those before it. {}", hint(.checked))]
    LossNotFinite {
        /// The step, counted from 1.
        step: usize,
        /// Mean over ranks and microbatches.
        loss: f64,
        /// Whether the outputs of units were checked.
        checked: bool,
    },
    /// The gradient norm is a NaN or an infinity although the loss is finite.
    #[error(
        "the gradient norm of step {step} is {norm} at a finite loss of {loss}; the weights are those before it"
    )]
    GradNormNotFinite {
        /// The step, counted from 1.
        step: usize,
        /// The loss.
        loss: f64,
        /// The norm.
        norm: f64,
    },
}

fn adapters(scale: &Option<f64>) -> String {
    scale.map_or_else(|| "no adapters".into(), |scale| format!("adapters of alpha / rank {scale}"))
}

fn base(base: &Option<Identity>) -> String {
    base.as_ref().map_or_else(|| "no pretrained model".into(), Identity::to_string)
}

fn hint(checked: &bool) -> &'static str {
    if *checked {
        "Every unit's output was finite"
    } else {
        "Run again with `check_finite` to learn which unit's output was the first that is not finite"
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
            "a sequence of 17 tokens is too long for a model of max_position_embeddings 16"
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
