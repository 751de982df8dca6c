//! The softmax of causal attention.

use crate::dtype::{by_dtype, pick};
use crate::launch::THREADS;
use crate::{Access, Args, DevicePtr, Dtype, Launch};

pub(crate) const CAUSAL_SOFTMAX: &[&str] = by_dtype!("causal_softmax");
pub(crate) const CAUSAL_SOFTMAX_BACKWARD: &[&str] = by_dtype!("causal_softmax_backward");

/// Rows up to this width belong to a warp, wider ones to a block.
const TEAM_WIDTH: u64 = 512;

fn over_rows(rows: u64, positions: u64, max_blocks: u32) -> Option<Launch> {
    let teams = if positions <= TEAM_WIDTH { u64::from(THREADS / 32) } else { 1 };
    if positions == 0 { None } else { Launch::over(rows.div_ceil(teams), max_blocks) }
}

/// The softmax of f32 scores, with weights of this dtype; takes [`CausalSoftmaxArgs`].
pub fn causal_softmax(dtype: Dtype) -> &'static str {
    pick(CAUSAL_SOFTMAX, dtype)
}

/// `weights = softmax(scores)` over the keys that each query sees: those up to its own position. Row `r` is of the
/// query at `r % positions`, so that heads and sequences follow each other.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CausalSoftmaxArgs {
    /// f32 `[rows, positions]`. What is not seen counts for nothing.
    pub scores: DevicePtr,
    /// `[rows, positions]`, written: 0 where nothing is seen.
    pub weights: DevicePtr,
    /// f32 `[rows]`, written: the logarithm of the sum of `exp(score)`, for backward.
    pub lse: DevicePtr,
    /// Rows of all heads and sequences.
    pub rows: u64,
    /// Queries of a sequence, and its keys.
    pub positions: u64,
}

// SAFETY: repr(C), the fields of `CausalSoftmaxArgs` in softmax.cuh.
unsafe impl Args for CausalSoftmaxArgs {
    fn launch(&self, max_blocks: u32) -> Option<Launch> {
        over_rows(self.rows, self.positions, max_blocks)
    }

    fn accesses(&self, [dtype, _]: [Dtype; 2]) -> Vec<Access> {
        let len = self.rows.saturating_mul(self.positions);
        vec![
            Access::read(self.scores, len, 4),
            Access::write(self.weights, len, dtype.size()),
            Access::write(self.lse, self.rows, 4),
        ]
    }
}

/// The gradient of the scores, with weights of this dtype; takes [`CausalSoftmaxBackwardArgs`].
pub fn causal_softmax_backward(dtype: Dtype) -> &'static str {
    pick(CAUSAL_SOFTMAX_BACKWARD, dtype)
}

/// The weights again, and `dscores = weights * (dweights - sum(weights * dweights)) * scale` of each row.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CausalSoftmaxBackwardArgs {
    /// As in forward.
    pub scores: DevicePtr,
    /// What forward wrote.
    pub lse: DevicePtr,
    /// f32 `[rows, positions]`: the gradient of the weights. What is not seen counts for nothing.
    pub dweights: DevicePtr,
    /// `[rows, positions]`, written: those of forward.
    pub weights: DevicePtr,
    /// `[rows, positions]`, written: 0 where nothing is seen.
    pub dscores: DevicePtr,
    /// Rows of all heads and sequences.
    pub rows: u64,
    /// Queries of a sequence, and its keys.
    pub positions: u64,
    /// What the scores were multiplied by: `dscores` is the gradient of what they were before.
    pub scale: f32,
}

// SAFETY: repr(C), the fields of `CausalSoftmaxBackwardArgs` in softmax.cuh.
unsafe impl Args for CausalSoftmaxBackwardArgs {
    fn launch(&self, max_blocks: u32) -> Option<Launch> {
        over_rows(self.rows, self.positions, max_blocks)
    }

    fn accesses(&self, [dtype, _]: [Dtype; 2]) -> Vec<Access> {
        let len = self.rows.saturating_mul(self.positions);
        vec![
            Access::read(self.scores, len, 4),
            Access::read(self.lse, self.rows, 4),
            Access::read(self.dweights, len, 4),
            Access::write(self.weights, len, dtype.size()),
            Access::write(self.dscores, len, dtype.size()),
        ]
    }
}
