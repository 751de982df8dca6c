//! Rotary position embedding.

use crate::access::span;
use crate::dtype::{by_dtype, pick};
use crate::{Access, Args, DevicePtr, Dtype, Launch};

pub(crate) const ROPE: &[&str] = by_dtype!("rope");

/// Rotary position embedding of this dtype; takes [`RopeArgs`].
pub fn rope(dtype: Dtype) -> &'static str {
    pick(ROPE, dtype)
}

/// Turns each head by its position's angles: element `i` of a head goes with element `i + half`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RopeArgs {
    /// Rows of `heads` heads of `2 * half` elements; row `r` is at position `r % positions`.
    pub x: DevicePtr,
    /// The same, written; may be `x`, at the same stride.
    pub out: DevicePtr,
    /// f32 `[positions, half]`.
    pub cos: DevicePtr,
    /// f32 `[positions, half]`.
    pub sin: DevicePtr,
    /// Rows of all sequences.
    pub rows: u64,
    /// Elements from row to row of `x`: more than a row has where it is part of a fused projection.
    pub x_stride: u64,
    /// Elements from row to row of `out`.
    pub out_stride: u64,
    /// Rows of a sequence.
    pub positions: u32,
    /// Heads of a row. With `half`, at most 2³¹ pairs.
    pub heads: u32,
    /// Half of a head's elements.
    pub half: u32,
    /// 1 forward; -1 for the gradient, which turns back.
    pub sign: f32,
}

// SAFETY: repr(C), the fields of `RopeArgs` in rope.cuh.
unsafe impl Args for RopeArgs {
    fn launch(&self, max_blocks: u32) -> Option<Launch> {
        if self.positions == 0 || self.heads == 0 || self.half == 0 {
            return None;
        }
        Launch::over(self.rows, max_blocks)
    }

    fn accesses(&self, [dtype, _]: [Dtype; 2]) -> Vec<Access> {
        let half = u64::from(self.half);
        let width = u64::from(self.heads).saturating_mul(2 * half);
        let angles = self.rows.min(self.positions.into()).saturating_mul(half);
        vec![
            Access::read(self.x, span(self.rows, width, self.x_stride), dtype.size()),
            Access::write(self.out, span(self.rows, width, self.out_stride), dtype.size()),
            Access::read(self.cos, angles, 4),
            Access::read(self.sin, angles, 4),
        ]
    }
}
