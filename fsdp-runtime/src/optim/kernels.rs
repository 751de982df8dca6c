//! Updates and norms that a device computes by kernels of its own.

use std::ops::Range;

use fsdp_comm::comm::CommError;
use fsdp_comm::device::Slice;

/// Kernels of a device, in the order of its compute stream.
///
/// # Safety
/// They touch no memory but the elements that they are given.
pub unsafe trait Kernels: Send + Sync {
    /// One step of AdamW on the elements of `runs`; gradients are multiplied with `grad_scale` first.
    ///
    /// # Errors
    /// If the slices differ in length, the moments are not of f32, or a run is not inside; those of the stream.
    fn adamw(
        &self,
        runs: &[AdamWRun],
        grad_scale: f32,
        weights: &Slice,
        grads: &Slice,
        moments: [&Slice; 2],
    ) -> Result<(), CommError>;

    /// The sum of the squares of all elements of all slices, in f64. Blocks until it is there.
    ///
    /// # Errors
    /// Those of the stream.
    fn squared_norm(&self, slices: &[Slice]) -> Result<f64, CommError>;
}

/// A run of elements with the scalars of one step of AdamW, each rounded once.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamWRun {
    /// The elements.
    pub elements: Range<usize>,
    /// What they are updated with.
    pub step: AdamWScalars,
}

/// The scalars of one step of AdamW.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWScalars {
    /// `1 - lr * weight_decay`.
    pub decay: f32,
    /// Decay rate of the first moment.
    pub beta1: f32,
    /// `1 - beta1`.
    pub one_minus_beta1: f32,
    /// Decay rate of the second moment.
    pub beta2: f32,
    /// `1 - beta2`.
    pub one_minus_beta2: f32,
    /// `lr / (1 - beta1^step)`.
    pub step_size: f32,
    /// `sqrt(1 - beta2^step)`.
    pub correction2: f32,
    /// Added to the denominator.
    pub eps: f32,
}
