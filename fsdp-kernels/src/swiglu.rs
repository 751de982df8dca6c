//! The gated activation of Llama's MLP.

use crate::access::span;
use crate::dtype::{by_dtype, pick};
use crate::{Access, Args, DevicePtr, Dtype, Launch};

pub(crate) const SWIGLU: &[&str] = by_dtype!("swiglu");
pub(crate) const SWIGLU_BACKWARD: &[&str] = by_dtype!("swiglu_backward");

/// SwiGLU of this dtype; takes [`SwigluArgs`].
pub fn swiglu(dtype: Dtype) -> &'static str {
    pick(SWIGLU, dtype)
}

/// `y = silu(gate) * up`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SwigluArgs {
    /// `[rows, width]`.
    pub gate: DevicePtr,
    /// `[rows, width]`.
    pub up: DevicePtr,
    /// `[rows, width]`, written; may be `gate` or `up`, at the same stride, unless backward is to follow.
    pub y: DevicePtr,
    /// Rows.
    pub rows: u64,
    /// Elements of a row.
    pub width: u64,
    /// Elements from row to row of `gate` and `up`: `2 * width` where both are halves of one matrix.
    pub in_stride: u64,
    /// Elements from row to row of `y`.
    pub out_stride: u64,
}

// SAFETY: repr(C), the fields of `SwigluArgs` in swiglu.cuh.
unsafe impl Args for SwigluArgs {
    fn launch(&self, max_blocks: u32) -> Option<Launch> {
        Launch::elements(self.rows.saturating_mul(self.width), max_blocks)
    }

    fn accesses(&self, [dtype, _]: [Dtype; 2]) -> Vec<Access> {
        let size = dtype.size();
        let input = span(self.rows, self.width, self.in_stride);
        vec![
            Access::read(self.gate, input, size),
            Access::read(self.up, input, size),
            Access::write(self.y, span(self.rows, self.width, self.out_stride), size),
        ]
    }
}

/// The gradients of SwiGLU; takes [`SwigluBackwardArgs`].
pub fn swiglu_backward(dtype: Dtype) -> &'static str {
    pick(SWIGLU_BACKWARD, dtype)
}

/// The gradients of `gate` and `up` for the gradient `dy` of `silu(gate) * up`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SwigluBackwardArgs {
    /// As in forward.
    pub gate: DevicePtr,
    /// As in forward.
    pub up: DevicePtr,
    /// Gradient of `y`.
    pub dy: DevicePtr,
    /// Gradient of `gate`, written; may be `gate`; 0: not wanted.
    pub dgate: DevicePtr,
    /// Gradient of `up`, written; may be `up`; 0: not wanted.
    pub dup: DevicePtr,
    /// Rows.
    pub rows: u64,
    /// Elements of a row.
    pub width: u64,
    /// Elements from row to row of `gate`, `up`, `dgate` and `dup`.
    pub in_stride: u64,
    /// Elements from row to row of `dy`.
    pub out_stride: u64,
}

// SAFETY: repr(C), the fields of `SwigluBackwardArgs` in swiglu.cuh.
unsafe impl Args for SwigluBackwardArgs {
    fn launch(&self, max_blocks: u32) -> Option<Launch> {
        Launch::elements(self.rows.saturating_mul(self.width), max_blocks)
    }

    fn accesses(&self, [dtype, _]: [Dtype; 2]) -> Vec<Access> {
        let size = dtype.size();
        let input = span(self.rows, self.width, self.in_stride);
        vec![
            Access::read(self.gate, input, size),
            Access::read(self.up, input, size),
            Access::read(self.dy, span(self.rows, self.width, self.out_stride), size),
            Access::write(self.dgate, input, size),
            Access::write(self.dup, input, size),
        ]
    }
}
