//! Errors of training runs.

use std::path::PathBuf;

use crate::product::TooMany;
use crate::run::Identity;

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
    #[error("a sequence of {seq} tokens is too long for a model of {positions} positions")]
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
