//! Root-mean-square normalisation.

use crate::dtype::{by_dtype, pick};
use crate::launch::THREADS;
use crate::{Access, Args, DevicePtr, Dtype, Launch};

pub(crate) const RMS_NORM: &[&str] = by_dtype!("rms_norm");
pub(crate) const RMS_NORM_BACKWARD: &[&str] = by_dtype!("rms_norm_backward");
pub(crate) const COLUMN_SUMS: &[&str] = by_dtype!("column_sums");

/// Rows up to this width belong to a warp, wider ones to a block.
const TEAM_WIDTH: u64 = 1024;

/// Rows whose weight gradients are summed by one team.
const ROWS: u64 = 32;

/// Dynamic shared memory that every device grants without an attribute, in bytes.
const SHARED_BYTES: u64 = 48 << 10;

/// Teams of a block.
const fn teams(width: u64) -> u64 {
    if width <= TEAM_WIDTH { THREADS as u64 / 32 } else { 1 }
}

/// RMSNorm of this dtype; takes [`RmsNormArgs`].
pub fn rms_norm(dtype: Dtype) -> &'static str {
    pick(RMS_NORM, dtype)
}

/// `y = weight * round(x * scale)` with `scale = 1 / sqrt(mean(x²) + eps)` of each row, in f32.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RmsNormArgs {
    /// `[rows, width]`.
    pub x: DevicePtr,
    /// `[width]`, of the dtype of `x`.
    pub weight: DevicePtr,
    /// `[rows, width]`, written; may be `x`, unless backward is to follow.
    pub y: DevicePtr,
    /// f32 `[rows]`, written: for backward.
    pub scales: DevicePtr,
    /// Rows.
    pub rows: u64,
    /// Elements of a row.
    pub width: u64,
    /// Added to the mean.
    pub eps: f32,
}

// SAFETY: repr(C), the fields of `RmsNormArgs` in rms_norm.cuh.
unsafe impl Args for RmsNormArgs {
    fn launch(&self, max_blocks: u32) -> Option<Launch> {
        if self.width == 0 {
            return None;
        }
        Launch::over(self.rows.div_ceil(teams(self.width)), max_blocks)
    }

    fn accesses(&self, [dtype, _]: [Dtype; 2]) -> Vec<Access> {
        let (size, len) = (dtype.size(), self.rows.saturating_mul(self.width));
        vec![
            Access::read(self.x, len, size),
            Access::read(self.weight, self.width, size),
            Access::write(self.y, len, size),
            Access::write(self.scales, self.rows, 4),
        ]
    }
}

/// The gradients of RMSNorm; takes [`RmsNormBackwardArgs`]. [`column_sums`] makes the weight's of the partial sums.
pub fn rms_norm_backward(dtype: Dtype) -> &'static str {
    pick(RMS_NORM_BACKWARD, dtype)
}

/// The gradient of `x`, and for each 32 rows the sum of their weight gradients, in row order.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RmsNormBackwardArgs {
    /// As in forward.
    pub x: DevicePtr,
    /// As in forward.
    pub weight: DevicePtr,
    /// Gradient of `y`.
    pub dy: DevicePtr,
    /// Those that forward wrote.
    pub scales: DevicePtr,
    /// Gradient of `x`, written; may be `dy`; 0: not wanted.
    pub dx: DevicePtr,
    /// f32 `[partial_rows(rows), width]`, written; 0: not wanted.
    pub partials: DevicePtr,
    /// Rows.
    pub rows: u64,
    /// Elements of a row.
    pub width: u64,
    in_shared: u32,
}

impl RmsNormBackwardArgs {
    /// Rows of partial sums for `rows` rows.
    pub const fn partial_rows(rows: u64) -> u64 {
        rows.div_ceil(ROWS)
    }

    /// The arguments for these buffers, in the order of the fields.
    pub fn new(inputs: [DevicePtr; 4], dx: DevicePtr, partials: DevicePtr, rows: u64, width: u64) -> Self {
        let [x, weight, dy, scales] = inputs;
        let in_shared = partials != 0 && teams(width) * width * 4 <= SHARED_BYTES;
        RmsNormBackwardArgs { x, weight, dy, scales, dx, partials, rows, width, in_shared: in_shared.into() }
    }
}

// SAFETY: repr(C), the fields of `RmsNormBackwardArgs` in rms_norm.cuh.
unsafe impl Args for RmsNormBackwardArgs {
    fn launch(&self, max_blocks: u32) -> Option<Launch> {
        if self.width == 0 {
            return None;
        }
        let teams = teams(self.width);
        let shared_bytes = if self.in_shared == 1 { (teams * self.width * 4) as u32 } else { 0 };
        let work = Self::partial_rows(self.rows).div_ceil(teams);
        Some(Launch { shared_bytes, ..Launch::over(work, max_blocks)? })
    }

    fn accesses(&self, [dtype, _]: [Dtype; 2]) -> Vec<Access> {
        let (size, len) = (dtype.size(), self.rows.saturating_mul(self.width));
        let partials = Self::partial_rows(self.rows).saturating_mul(self.width);
        vec![
            Access::read(self.x, len, size),
            Access::read(self.weight, self.width, size),
            Access::read(self.dy, len, size),
            Access::read(self.scales, self.rows, 4),
            Access::write(self.dx, len, size),
            Access::write(self.partials, partials, 4),
        ]
    }
}

/// The sum of each column of an f32 matrix, into a vector of this dtype; takes [`ColumnSumsArgs`].
pub fn column_sums(out: Dtype) -> &'static str {
    pick(COLUMN_SUMS, out)
}

/// `out (+)=` the sum of the rows of `values`, in one order, in f32.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ColumnSumsArgs {
    /// f32 `[rows, width]`.
    pub values: DevicePtr,
    /// `[width]`, written.
    pub out: DevicePtr,
    /// Rows; the sum of none is 0.
    pub rows: u64,
    /// Columns.
    pub width: u64,
    /// 1 to add to what `out` holds, 0 to overwrite it.
    pub add: u32,
}

// SAFETY: repr(C), the fields of `ColumnSumsArgs` in rms_norm.cuh.
unsafe impl Args for ColumnSumsArgs {
    fn launch(&self, max_blocks: u32) -> Option<Launch> {
        Launch::over(self.width.div_ceil(32), max_blocks)
    }

    fn accesses(&self, [out, _]: [Dtype; 2]) -> Vec<Access> {
        vec![
            Access::read(self.values, self.rows.saturating_mul(self.width), 4),
            Access::write(self.out, self.width, out.size()),
        ]
    }
}
