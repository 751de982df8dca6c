//! The gated activation on a CUDA device.

use candle_core::{CudaStorage, Layout, Result, Shape, Tensor};
use fsdp_kernels::{SwigluArgs, SwigluBackwardArgs, swiglu, swiglu_backward};

use crate::ops::cuda::present::{self as cuda, Buffer, View};
use crate::ops::cuda::table::{CudaBackward, CudaForward};
use crate::ops::swiglu::{OP, Swiglu};

/// `silu(gate) * up`.
///
/// # Panics
/// If they are not of one length and dtype.
pub fn forward(gate: View<'_>, up: View<'_>) -> Result<Buffer> {
    assert_eq!((gate.len(), gate.dtype()), (up.len(), up.dtype()));
    let mut y = Buffer::new(gate.device(), gate.dtype(), gate.len())?;
    let len = gate.len() as u64;
    let args = SwigluArgs {
        gate: gate.at(),
        up: up.at(),
        y: y.out().at(),
        rows: 1,
        width: len,
        in_stride: len,
        out_stride: len,
    };
    // SAFETY: the arguments of this kernel: one row of all elements.
    unsafe { cuda::launch(gate.device(), swiglu(gate.dtype()), &args) }?;
    Ok(y)
}

/// The gradients of gate and up that are wanted, for the gradient `dy` of `silu(gate) * up`.
///
/// # Panics
/// If they are not of one length and dtype.
pub fn backward(
    gate: View<'_>,
    up: View<'_>,
    dy: View<'_>,
    wanted: [bool; 2],
) -> Result<[Option<Buffer>; 2]> {
    assert_eq!((gate.len(), gate.dtype()), (up.len(), up.dtype()));
    assert_eq!((gate.len(), gate.dtype()), (dy.len(), dy.dtype()));
    let new = |wanted| match wanted {
        true => Buffer::new(gate.device(), gate.dtype(), gate.len()).map(Some),
        false => Ok(None),
    };
    let [mut dgate, mut dup] = [new(wanted[0])?, new(wanted[1])?];
    let len = gate.len() as u64;
    let args = SwigluBackwardArgs {
        gate: gate.at(),
        up: up.at(),
        dy: dy.at(),
        dgate: dgate.as_mut().map_or(0, |dgate| dgate.out().at()),
        dup: dup.as_mut().map_or(0, |dup| dup.out().at()),
        rows: 1,
        width: len,
        in_stride: len,
        out_stride: len,
    };
    // SAFETY: the arguments of this kernel: one row of all elements.
    unsafe { cuda::launch(gate.device(), swiglu_backward(gate.dtype()), &args) }?;
    Ok([dgate, dup])
}

impl CudaForward<2> for Swiglu {
    fn on_cuda(
        &self,
        [(gate, layout), (up, up_layout)]: [(&CudaStorage, &Layout); 2],
    ) -> Result<(CudaStorage, Shape)> {
        let y = forward(View::new(OP, gate, layout)?, View::new(OP, up, up_layout)?)?;
        Ok((y.into_storage(), layout.shape().clone()))
    }
}

impl CudaBackward<2> for Swiglu {
    fn bwd_on_cuda(&self, [gate, up]: [&Tensor; 2], dy: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let wanted = [gate.track_op(), up.track_op()];
        let [dgate, dup] = backward(View::of(OP, gate)?, View::of(OP, up)?, View::of(OP, dy)?, wanted)?;
        Ok([cuda::gradient(gate, dgate), cuda::gradient(up, dup)])
    }
}
