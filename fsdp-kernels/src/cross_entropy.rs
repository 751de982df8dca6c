//! Cross-entropy of logits against target ids.

use crate::dtype::{by_dtype, pick};
use crate::{Access, Args, DevicePtr, Dtype, Launch};

pub(crate) const CROSS_ENTROPY: &[&str] = by_dtype!("cross_entropy");
pub(crate) const CROSS_ENTROPY_BACKWARD: &[&str] = by_dtype!("cross_entropy_backward");

/// No target is ignored.
pub const NO_IGNORED_TARGET: i64 = -1;

/// The losses of rows of logits of this dtype; takes [`CrossEntropyArgs`]. [`sum_f64`](crate::sum_f64()) makes their
/// mean.
pub fn cross_entropy(dtype: Dtype) -> &'static str {
    pick(CROSS_ENTROPY, dtype)
}

/// `losses[r] = -log softmax(logits[r])[targets[r]]`.
///
/// A row whose target is not below `vocab`, nor ignored, has loss NaN.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CrossEntropyArgs {
    /// `[rows, vocab]`.
    pub logits: DevicePtr,
    /// u32 `[rows]`.
    pub targets: DevicePtr,
    /// f64 `[rows]`, written; 0 for rows that are ignored.
    pub losses: DevicePtr,
    /// f32 `[rows]`, written: the largest logit of each row, for backward.
    pub maxima: DevicePtr,
    /// f32 `[rows]`, written: the sum of `exp(logit - largest)`, for backward.
    pub sums: DevicePtr,
    /// Rows.
    pub rows: u64,
    /// Logits of a row.
    pub vocab: u64,
    /// Rows with this target count for nothing; [`NO_IGNORED_TARGET`]: none do.
    pub ignored: i64,
}

// SAFETY: repr(C), the fields of `CrossEntropyArgs` in cross_entropy.cuh.
unsafe impl Args for CrossEntropyArgs {
    fn launch(&self, max_blocks: u32) -> Option<Launch> {
        Launch::over(self.rows, max_blocks)
    }

    fn accesses(&self, [dtype, _]: [Dtype; 2]) -> Vec<Access> {
        let len = self.rows.saturating_mul(self.vocab);
        vec![
            Access::read(self.logits, len, dtype.size()),
            Access::read(self.targets, self.rows, 4),
            Access::write(self.losses, self.rows, 8),
            Access::write(self.maxima, self.rows, 4),
            Access::write(self.sums, self.rows, 4),
        ]
    }
}

/// The gradient of logits of this dtype; takes [`CrossEntropyBackwardArgs`].
pub fn cross_entropy_backward(dtype: Dtype) -> &'static str {
    pick(CROSS_ENTROPY_BACKWARD, dtype)
}

/// `dlogits = (softmax(logits) - one_hot(target)) * dloss / divisor`, 0 in rows that are ignored.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CrossEntropyBackwardArgs {
    /// As in forward.
    pub logits: DevicePtr,
    /// As in forward.
    pub targets: DevicePtr,
    /// Those that forward wrote.
    pub maxima: DevicePtr,
    /// Those that forward wrote.
    pub sums: DevicePtr,
    /// `[rows, vocab]`, written; may be `logits`.
    pub dlogits: DevicePtr,
    /// One f32: the gradient of the loss; 0: it is 1.
    pub dloss: DevicePtr,
    /// Rows.
    pub rows: u64,
    /// Logits of a row.
    pub vocab: u64,
    /// As in forward.
    pub ignored: i64,
    /// What the sum of the losses was divided by.
    pub divisor: f64,
}

// SAFETY: repr(C), the fields of `CrossEntropyBackwardArgs` in cross_entropy.cuh.
unsafe impl Args for CrossEntropyBackwardArgs {
    fn launch(&self, max_blocks: u32) -> Option<Launch> {
        Launch::over(self.rows, max_blocks)
    }

    fn accesses(&self, [dtype, _]: [Dtype; 2]) -> Vec<Access> {
        let len = self.rows.saturating_mul(self.vocab);
        vec![
            Access::read(self.logits, len, dtype.size()),
            Access::read(self.targets, self.rows, 4),
            Access::read(self.maxima, self.rows, 4),
            Access::read(self.sums, self.rows, 4),
            Access::write(self.dlogits, len, dtype.size()),
            Access::read(self.dloss, 1, 4),
        ]
    }
}
