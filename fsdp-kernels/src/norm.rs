//! Norms of gradients without the host: partial sums, their sum, the coefficient that clips.
//!
//! For buffers `0..n` of a rank: [`squared_norm`] of each into one array of partials, one [`sum_f64`] over it, the sum
//! over the ranks (8 bytes), [`clip_scale`]; AdamW reads the coefficient from device memory.

use crate::dtype::{by_dtype, pick};
use crate::{Access, Args, DevicePtr, Dtype, Launch};

pub(crate) const SQUARED_NORM: &[&str] = by_dtype!("squared_norm");
pub(crate) const SUM_F64: &str = "fsdp_sum_f64";
pub(crate) const CLIP_SCALE: &str = "fsdp_clip_scale";

/// Elements behind one partial sum.
const CHUNK: u64 = 8192;

/// Partial sums of the squares of a buffer of this dtype; takes [`SquaredNormArgs`].
pub fn squared_norm(dtype: Dtype) -> &'static str {
    pick(SQUARED_NORM, dtype)
}

/// `partials[c]` becomes the sum of the squares of elements `8192 c ..`, in f64.
///
/// The bits depend on the values and on where the buffer starts, not on the grid: sum over the same cuts to compare.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SquaredNormArgs {
    /// Read.
    pub values: DevicePtr,
    /// f64, [`SquaredNormArgs::partials_for`] of them, written.
    pub partials: DevicePtr,
    /// Elements.
    pub len: u64,
}

impl SquaredNormArgs {
    /// Number of partial sums of `len` elements.
    pub const fn partials_for(len: u64) -> u64 {
        len.div_ceil(CHUNK)
    }
}

// SAFETY: repr(C), the fields of `SquaredNormArgs` in norm.cuh.
unsafe impl Args for SquaredNormArgs {
    fn launch(&self, max_blocks: u32) -> Option<Launch> {
        Launch::over(SquaredNormArgs::partials_for(self.len), max_blocks)
    }

    fn accesses(&self, [dtype, _]: [Dtype; 2]) -> Vec<Access> {
        vec![
            Access::read(self.values, self.len, dtype.size()),
            Access::write(self.partials, Self::partials_for(self.len), 8),
        ]
    }
}

/// The sum of f64 values in one order; takes [`SumArgs`].
pub fn sum_f64() -> &'static str {
    SUM_F64
}

/// The sum of `values`, divided: of partial norms (by 1), or of the losses of tokens (by their number).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SumArgs {
    /// f64, read.
    pub values: DevicePtr,
    /// One f64, written; 0: not wanted.
    pub total: DevicePtr,
    /// The same as f32; 0: not wanted.
    pub rounded: DevicePtr,
    /// Number of values; the sum of none is 0.
    pub len: u64,
    /// What the sum is divided by.
    pub divisor: f64,
}

// SAFETY: repr(C), the fields of `SumArgs` in norm.cuh.
unsafe impl Args for SumArgs {
    fn launch(&self, _: u32) -> Option<Launch> {
        Some(Launch::ONE)
    }

    fn accesses(&self, _: [Dtype; 2]) -> Vec<Access> {
        vec![
            Access::read(self.values, self.len, 8),
            Access::write(self.total, 1, 8),
            Access::write(self.rounded, 1, 4),
        ]
    }
}

/// The coefficient that clips gradients; takes [`ClipScaleArgs`].
pub fn clip_scale() -> &'static str {
    CLIP_SCALE
}

/// `norm = sqrt(squared_norm)`, `scale = min(1, max_norm / (norm + 1e-6))`, NaN if the norm is.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ClipScaleArgs {
    /// One f64: the squared norm over all ranks.
    pub squared_norm: DevicePtr,
    /// One f64, written.
    pub norm: DevicePtr,
    /// One f32, written, for [`AdamWArgs::grad_scale`](crate::AdamWArgs::grad_scale).
    pub scale: DevicePtr,
    /// What the norm may be.
    pub max_norm: f64,
}

// SAFETY: repr(C), the fields of `ClipScaleArgs` in norm.cuh.
unsafe impl Args for ClipScaleArgs {
    fn launch(&self, _: u32) -> Option<Launch> {
        Some(Launch::ONE)
    }

    fn accesses(&self, _: [Dtype; 2]) -> Vec<Access> {
        vec![
            Access::read(self.squared_norm, 1, 8),
            Access::write(self.norm, 1, 8),
            Access::write(self.scale, 1, 4),
        ]
    }
}
