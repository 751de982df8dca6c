//! Policies: strategies, resharding and dtypes, as far as they decide the bytes that a rank holds.
//!
//! The engine obeys them, and the [memory formula](crate::layout::MemoryPlan) computes from them how many bytes it will hold. They
//! are in this crate because the compiler evaluates the formula. Descriptions of parameters ([`spec`](crate::spec)) do not use them.
//! Policies that take no memory belong to the engine.

mod names;

use serde::Serialize;

use crate::spec::Dtype;

/// When a unit's whole weights are resharded between its forward and its backward, where the strategy shards
/// parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReshardAfterForward {
    /// Given up when another unit needs the memory; the backward gathers them again from all ranks. The last
    /// units of a forward, which the pool still holds, are not gathered again.
    #[default]
    Always,
    /// Kept until the backward: a unit of memory of its own for each such unit, and half the gathers.
    Never,
    /// Given up but for one part in so many, which a group of so many neighbouring ranks holds together: the
    /// backward gathers within that group. The number must divide that of the ranks that share the shards.
    Ranks(usize),
}

/// What the outer data-parallel ranks (`dp_outer`: replicas of the sharded model) share of the state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OuterStrategy {
    /// Nothing: each has what its inner rank has. Gradients are all-reduced once a step.
    #[default]
    NoShard,
    /// Each updates a part of its inner shard: optimizer state and main weights are cut among the outer ranks
    /// too. Gradients are reduce-scattered once a step, weights all-gathered once after it.
    Optim,
}

impl OuterStrategy {
    /// The spelling of the command line: `no-shard`, `optim`.
    pub const fn name(self) -> &'static str {
        match self {
            OuterStrategy::NoShard => "no-shard",
            OuterStrategy::Optim => "optim",
        }
    }
}

impl std::fmt::Display for OuterStrategy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Dtypes of a training run. Printing one says what each is.
///
/// What is not here is FP32 always: sums over ranks, each formed before it is rounded to where it is stored, and the
/// optimizer's state.
///
/// ```
/// use fsdp_layout::policy::MixedPrecision;
/// use fsdp_layout::spec::Dtype;
///
/// let precision = MixedPrecision { output: Some(Dtype::F32), cast_inputs: true, ..MixedPrecision::BF16 };
/// assert_eq!(
///     precision.to_string(),
///     "weights bf16 on the wire and in compute, main weights f32, unreduced gradients f32, main gradients f32, \
///      inputs of units cast to their weights' dtype, outputs of units cast to f32"
/// );
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MixedPrecision {
    /// Dtype of the model weights, on the wire and in compute, where neither the parameter nor an attribute
    /// says otherwise.
    pub param: Dtype,
    /// Dtype in which unreduced gradients are held and travel. Ranks' sums are formed in FP32 whatever it is. What a rank
    /// holds back, under `no_sync` or of a unit that runs several times in one backward, it adds up in this dtype where
    /// gradients are sharded, as `reduce_dtype` of PyTorch's FSDP2 does ("dtype of no-sync gradient accumulation"): 16 bits
    /// lose small terms of long sums, and halve what is held. Keep it FP32, the default, or accumulate without `no_sync`, which
    /// reduces each microbatch into the main gradients. ZeRO-0 and 1 add up in the main gradients' dtype.
    pub reduce: Dtype,
    /// Keep FP32 main weights of 16-bit parameters, which the optimizer updates. Without them it updates the 16-bit
    /// weights: each step is rounded, which saves 4 bytes a parameter and loses small steps.
    pub main_weights: bool,
    /// Dtype in which reduced gradients are kept and accumulated over microbatches: FP32, or that of `reduce`.
    pub main_grads: Dtype,
    /// Cast what goes into a unit to the dtype of the unit's (first) weights. Integers are left alone, and so is a
    /// unit's context.
    pub cast_inputs: bool,
    /// Cast what comes out of a unit to this dtype; `None` leaves it as computed. With `cast_inputs`, activations
    /// between units can have more bits than those inside.
    pub output: Option<Dtype>,
}

impl Default for MixedPrecision {
    /// All FP32.
    fn default() -> Self {
        MixedPrecision::F32
    }
}

impl MixedPrecision {
    /// All FP32.
    pub const F32: MixedPrecision = MixedPrecision {
        param: Dtype::F32,
        reduce: Dtype::F32,
        main_weights: true,
        main_grads: Dtype::F32,
        cast_inputs: false,
        output: None,
    };

    /// bfloat16 weights, FP32 reduction, FP32 main weights and gradients.
    pub const BF16: MixedPrecision = MixedPrecision { param: Dtype::BF16, ..MixedPrecision::F32 };

    /// binary16 weights, FP32 reduction, FP32 main weights and gradients. To be trained with a scaled loss, or small
    /// gradients are lost.
    pub const F16: MixedPrecision = MixedPrecision { param: Dtype::F16, ..MixedPrecision::F32 };
}

impl std::fmt::Display for MixedPrecision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let MixedPrecision { param, reduce, main_weights, main_grads, cast_inputs, output } = self;
        let main = if *main_weights { "main weights f32" } else { "no main weights" };
        write!(f, "weights {param} on the wire and in compute, {main}, ")?;
        write!(f, "unreduced gradients {reduce}, main gradients {main_grads}, ")?;
        let inputs = if *cast_inputs { "cast to their weights' dtype" } else { "as they come" };
        write!(f, "inputs of units {inputs}, outputs of units ")?;
        match output {
            Some(output) => write!(f, "cast to {output}"),
            None => f.write_str("as computed"),
        }
    }
}

/// How much of the training state is sharded among the `dp_shard` ranks (ZeRO-0 to 3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// ZeRO-0: weights, gradients and optimizer state whole on each rank; gradients all-reduced.
    NoShard,
    /// ZeRO-1: optimizer state (and main weights) sharded.
    Optim,
    /// ZeRO-2: gradients too.
    OptimGrads,
    /// ZeRO-3: parameters too.
    #[default]
    OptimGradsParams,
}

impl Strategy {
    /// All of them, least sharded first.
    pub const ALL: [Strategy; 4] =
        [Strategy::NoShard, Strategy::Optim, Strategy::OptimGrads, Strategy::OptimGradsParams];

    /// The spelling of the command line: `no-shard`, `optim`, `optim-grads`, `optim-grads-params`.
    pub const fn name(self) -> &'static str {
        match self {
            Strategy::NoShard => "no-shard",
            Strategy::Optim => "optim",
            Strategy::OptimGrads => "optim-grads",
            Strategy::OptimGradsParams => "optim-grads-params",
        }
    }

    /// Model weights are held as shards between uses.
    pub const fn shards_params(self) -> bool {
        matches!(self, Strategy::OptimGradsParams)
    }

    /// Main gradients are held as shards.
    pub const fn shards_grads(self) -> bool {
        matches!(self, Strategy::OptimGrads | Strategy::OptimGradsParams)
    }

    /// Optimizer state is held as shards.
    pub const fn shards_optim(self) -> bool {
        !matches!(self, Strategy::NoShard)
    }
}

impl std::fmt::Display for Strategy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
