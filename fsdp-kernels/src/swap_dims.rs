//! Positions and heads, swapped.

use crate::dtype::{by_dtype, pick};
use crate::{Access, Args, DevicePtr, Dtype, Launch};

pub(crate) const SWAP_DIMS: &[&str] = by_dtype!("swap_dims");

/// A copy of elements of this dtype with two dims swapped; takes [`SwapDimsArgs`].
pub fn swap_dims(dtype: Dtype) -> &'static str {
    pick(SWAP_DIMS, dtype)
}

/// `to[b, j, i, ..] = from[b, i, j, ..]`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SwapDimsArgs {
    /// `[batch, first, second, width]`.
    pub from: DevicePtr,
    /// `[batch, second, first, width]`, written.
    pub to: DevicePtr,
    /// Matrices of rows.
    pub batch: u64,
    /// The dim that becomes the second.
    pub first: u64,
    /// The dim that becomes the first.
    pub second: u64,
    /// Elements that stay together.
    pub width: u64,
}

impl SwapDimsArgs {
    fn len(&self) -> u64 {
        let rows = self.batch.saturating_mul(self.first).saturating_mul(self.second);
        rows.saturating_mul(self.width)
    }
}

// SAFETY: repr(C), the fields of `SwapDimsArgs` in swap_dims.cuh.
unsafe impl Args for SwapDimsArgs {
    fn launch(&self, max_blocks: u32) -> Option<Launch> {
        Launch::elements(self.len(), max_blocks)
    }

    fn accesses(&self, [dtype, _]: [Dtype; 2]) -> Vec<Access> {
        vec![
            Access::read(self.from, self.len(), dtype.size()),
            Access::write(self.to, self.len(), dtype.size()),
        ]
    }
}
