//! Optimizers, as rules over flat f32 shards.
//!
//! An optimizer here sees runs of elements, not parameters: which of them a rank holds, where they are and
//! when a step is due is the engine's matter. The rules are element-wise, so that a step does not depend on
//! how a model is sharded: any cut of a parameter into [`Segment`]s gives the same bits. Rules that need a
//! parameter whole ([`OwnerRule`]) run on one rank, the parameter's owner.

mod adamw;
mod groups;
mod kernels;
mod loss_scale;
mod muon;
mod norm;
mod owner;
mod schedule;
mod sgd;

pub use adamw::AdamW;
pub use fsdp_comm::device::move_average;
pub use groups::{Overrides, ParamGroup};
pub use kernels::{AdamWRun, AdamWScalars, Kernels};
pub use loss_scale::{LossScaler, LossScalerState};
pub use muon::Muon;
pub use norm::{clip_scale, squared_norm};
pub(crate) use owner::choose_owners;
pub use owner::{OwnerFn, OwnerRule, WholeParam};
pub use schedule::CosineSchedule;
pub use sgd::Sgd;

use thiserror::Error;

/// One contiguous run of elements with the same rules: a parameter's part of the shard. May be empty.
///
/// All slices have the same length. Weights are the main weights where the model keeps them, else the model
/// weights.
#[derive(Debug)]
pub struct Segment<'a> {
    /// Weights, updated in place.
    pub weights: &'a mut [f32],
    /// Gradients, before [`StepInfo::grad_scale`].
    pub grads: &'a [f32],
    /// State buffers in the order of [`Optimizer::state_names`], updated in place; all zero before the first
    /// step.
    pub states: Vec<&'a mut [f32]>,
    /// Weight decay applies.
    pub decay: bool,
    /// What the parameter's group changes of the rule's settings.
    pub overrides: Overrides,
}

/// What the segments of one step have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepInfo {
    /// Number of this step, from 1.
    pub step: u64,
    /// Multiplied into each gradient first, in f32: the clipping coefficient, or 1.
    pub grad_scale: f32,
}

/// An update that devices have a kernel for.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum KernelUpdate {
    /// One step of [`AdamW`].
    AdamW(AdamWScalars),
}

/// An element-wise rule that updates weights from gradients.
pub trait Optimizer: Send {
    /// Name, as in checkpoints and reports.
    fn name(&self) -> &'static str;

    /// Names of the f32 state buffers, as in checkpoints. Each has one element for each element of the
    /// weights.
    fn state_names(&self) -> &'static [&'static str];

    /// Updates weights and states of one segment.
    ///
    /// # Panics
    /// If the slices differ in length, or there are not as many states as names.
    fn update(&self, at: StepInfo, segment: &mut Segment<'_>);

    /// What a device updates such a segment with by a kernel of its own, if it has one for the rule; it must be the same
    /// update. Other rules run on the host, on copies of what is on the device.
    fn kernel_update(&self, _at: StepInfo, _decay: bool, _overrides: Overrides) -> Option<KernelUpdate> {
        None
    }

    /// Learning rate of the next step.
    fn learning_rate(&self) -> f64;

    /// Sets the learning rate of the next step.
    fn set_learning_rate(&mut self, lr: f64);

    /// The rule with its settings, which ranks compare before the first step.
    fn describe(&self) -> String {
        format!("optimizer {}, learning rate {}", self.name(), self.learning_rate())
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// If one is out of range; names it.
    fn validate(&self) -> Result<(), OptimError>;

    /// Checks what a parameter group changes of the settings. A rule that follows
    /// [`Segment::overrides`] says here which of them; by default none, so that no setting is silently lost.
    ///
    /// # Errors
    /// If the rule has no such setting, or the value is out of range; names it.
    fn check_overrides(&self, overrides: &Overrides) -> Result<(), OptimError> {
        groups::refuse_overrides(self, overrides)
    }
}

/// What can be wrong with an optimizer.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum OptimError {
    /// A setting is out of range.
    #[error("{optimizer}: {setting} must be {expected}, got {got}")]
    OutOfRange {
        /// Name of the optimizer or schedule.
        optimizer: &'static str,
        /// Name of the setting.
        setting: &'static str,
        /// The values it may have.
        expected: &'static str,
        /// Its value.
        got: f64,
    },
    /// A parameter group changes a setting that the rule does not have, or does not take from groups.
    #[error("{optimizer}: a parameter group cannot change the {setting} of this rule")]
    Unsupported {
        /// Name of the optimizer.
        optimizer: &'static str,
        /// Name of the setting.
        setting: &'static str,
    },
    /// A rule for whole parameters failed, in its own words.
    #[error("{0}")]
    Failed(String),
}

/// Checks one setting after another for one optimizer.
struct Range {
    optimizer: &'static str,
}

impl Range {
    fn at_least_zero(&self, setting: &'static str, got: f64) -> Result<(), OptimError> {
        self.check(setting, "finite and at least 0", got, got.is_finite() && got >= 0.0)
    }

    fn below_one(&self, setting: &'static str, got: f64) -> Result<(), OptimError> {
        self.check(setting, "at least 0 and below 1", got, (0.0..1.0).contains(&got))
    }

    fn check(
        &self,
        setting: &'static str,
        expected: &'static str,
        got: f64,
        holds: bool,
    ) -> Result<(), OptimError> {
        if holds {
            Ok(())
        } else {
            Err(OptimError::OutOfRange { optimizer: self.optimizer, setting, expected, got })
        }
    }
}
