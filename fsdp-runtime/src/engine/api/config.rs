//! How a model is sharded and trained.

use crate::comm::Registration;
use crate::layout::ShardAlignment;
use crate::spec::{MixedPrecision, OuterStrategy, ReshardAfterForward, Strategy};

/// How the contributions of the data-parallel ranks are combined. Those of a rank's microbatches are summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GradientScaling {
    /// Averaged over the ranks: right if a rank's loss is a mean over its tokens.
    #[default]
    Mean,
    /// Summed.
    Sum,
    /// Summed, and divided by the number of valid tokens of all ranks and microbatches of the step: every token
    /// counts the same, however unevenly ranks have them. Backwards are run by
    /// [`backward_tokens`](crate::engine::Fsdp::backward_tokens).
    PerToken,
}

/// Whether a unit keeps its inner activations for the backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    /// Keeps them.
    #[default]
    None,
    /// Keeps only the unit's inputs and runs its forward again in the backward, under the gather that the
    /// backward needs anyway.
    Unit,
}

/// What is done with gradients that are infinite or NaN, on all ranks together: an optimizer step would write them into
/// all weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NonFinite {
    /// Clipping, and a step for which the norm of the gradients is known, are errors that name a parameter and a rank.
    /// Nothing is changed, and [`reset_step`](crate::engine::Fsdp::reset_step) goes on. A step without clipping does not look at
    /// the norm, unless [`FsdpConfig::check_finite`] is set.
    #[default]
    Error,
    /// The optimizer's step is skipped, which it returns: weights, optimizer state and counts of steps stay, and the
    /// gradients are forgotten. A step without clipping takes the norm of the gradients to look at it, which has the
    /// ranks, and the device, wait for each other.
    SkipStep,
}

/// Settings of [`fully_shard_with`](crate::engine::FullyShard::fully_shard_with). The same on all ranks.
///
/// Write a configuration as a literal that ends in `..FsdpConfig::default()`: a new setting has a default, so such a literal goes on
/// compiling. (That is why the struct is not `#[non_exhaustive]`, which forbids literals in other crates.)
#[derive(Clone, Debug, PartialEq)]
pub struct FsdpConfig {
    /// What is sharded among the ranks of `dp_shard` (and `cp`, which shares the shards).
    pub strategy: Strategy,
    /// What the ranks of `dp_outer`, each a replica of the sharded model, share besides.
    pub outer: OuterStrategy,
    /// Where shard boundaries may fall.
    pub alignment: ShardAlignment,
    /// Dtypes.
    pub precision: MixedPrecision,
    /// How gradients are combined over ranks. Contributions of microbatches are always summed.
    pub scaling: GradientScaling,
    /// Recomputation for the units that do not say.
    pub recompute: Recompute,
    /// Whether units keep their whole weights between forward and backward. A unit may say otherwise for itself.
    pub reshard_after_forward: ReshardAfterForward,
    /// Give a unit's whole weights up as soon as its backward is over, and free their memory where they are kept between
    /// the passes ([`ReshardAfterForward::Never`], and the root's always), unless another backward of it is to come.
    /// Otherwise they stay until another unit needs the memory, or the
    /// weights change: clipping and the optimizer's step run beside them, and the first units of another microbatch, with
    /// `Never` all, are not gathered again.
    pub reshard_after_backward: bool,
    /// Units gathered ahead, in forward and in backward; see also
    /// [`set_prefetch`](crate::engine::Fsdp::set_prefetch). Whole weights of so many units and one more are there at a time,
    /// two at least, whatever their shapes; the root's come on top, and those of units that others run inside of.
    pub prefetch: usize,
    /// Most elements of the units' whole weights at a time, one unit apart: it gives units up, or holds a prefetch back.
    /// `None` for no limit but the number of units.
    pub gather_budget: Option<usize>,
    /// Most elements of the units' unreduced gradients at a time, one unit apart: before a unit's are written, those that
    /// were launched first are waited for. `None` for those of two units, whatever their shapes. The root's come on
    /// top.
    pub reduce_budget: Option<usize>,
    /// Keep whole weights, and the memory of both pools, until the room is needed; otherwise they come and go.
    pub double_buffer: bool,
    /// Register the buffers of the root and of units that are alike with NCCL, which then needs no buffers of its own on
    /// the way where the links between the ranks allow for that. They are allocated at once, by NCCL, each in whole pages
    /// of 2 MiB. So are the shards, where there are outer ranks, whose collectives work on them. Needs `double_buffer`, for addresses that are stable, and ranks that are joined by NCCL; without effect
    /// with strategies that have no pool.
    pub registration: Option<Registration>,
    /// Elements after which a bucket of root parameters is closed; `None` for one bucket a group, all gathered and reduced
    /// as one. With a size each bucket is gathered by itself and, where gradients are sharded, reduced as soon as its
    /// gradients are complete, going by where they were in the backward before. That is known of gradients that ops write
    /// into their [`GradSink`](crate::engine::GradSink), as those of `fsdp-models` do; those of candle's own ops come at the end.
    pub bucket_size: Option<usize>,
    /// Seed of the initial weights.
    pub seed: u64,
    /// Check every unit's output and name the first unit that produces a NaN or an infinity; and the gradients of every
    /// step that is not inside the backward, which is what [`FsdpConfig::non_finite`] then says of them.
    pub check_finite: bool,
    /// What is done with gradients that are infinite or NaN.
    pub non_finite: NonFinite,
    /// Fail the first optimizer step if a trainable parameter got no gradient on any rank, and any step before which a
    /// training forward had [no backward](crate::engine::Fsdp::forwards_without_backward); otherwise they are only reported
    /// ([parameters](crate::engine::Fsdp::parameters_without_gradient)).
    pub strict_gradients: bool,
    /// Fill buffers with NaN when they are returned, so that a late reader is noticed; and look at every element of a
    /// unit's weights before and after each of its uses, so that a program which changes them in place gets an error. On by
    /// default in debug builds. Without it every element is looked at in the first step; afterwards every element of a
    /// parameter of 1 KiB or less, and of a larger one 32 elements, others each time, and all in one use of 64. So a change
    /// of all elements is found at once whatever the strategy, one of a few that is made in every forward sooner or later. One
    /// of a few that is made once, after the first step, may not be: it lasts where weights are held whole (with one rank, or
    /// without [`Strategy::OptimGradsParams`]) until main weights, if there are any, are installed over it, and is lost
    /// where they are gathered anew. On a CUDA device values are not looked at, only whether the memory is still the one
    /// that was lent.
    pub poison: bool,
    /// Step the optimizer unit by unit inside the backward, with
    /// [`backward_and_step`](crate::engine::ShardedOptimizer::backward_and_step): main gradients are then held for one
    /// unit at a time, and cannot be clipped or accumulated over microbatches. Needs a strategy that shards
    /// gradients.
    pub step_in_backward: bool,
    /// Record a trace of compute and communication.
    pub trace: bool,
}

impl Default for FsdpConfig {
    fn default() -> Self {
        FsdpConfig {
            strategy: Strategy::default(),
            outer: OuterStrategy::default(),
            alignment: ShardAlignment::default(),
            precision: MixedPrecision::default(),
            scaling: GradientScaling::default(),
            recompute: Recompute::default(),
            reshard_after_forward: ReshardAfterForward::default(),
            reshard_after_backward: false,
            prefetch: 1,
            gather_budget: None,
            reduce_budget: None,
            double_buffer: true,
            registration: None,
            bucket_size: None,
            seed: 0,
            check_finite: false,
            non_finite: NonFinite::default(),
            strict_gradients: false,
            poison: cfg!(debug_assertions),
            step_in_backward: false,
            trace: false,
        }
    }
}
