//! Building blocks of the ops on CUDA devices: elements in device memory, matrix products, kernel launches.
//!
//! All work goes to candle's stream of the arguments' device, in program order. candle allocates and frees storage in the
//! order of that stream too: what an op drops after it has submitted its work is used again only after that work.

mod gemm;
mod memory;
mod weight_grad;

pub(super) use gemm::{Matrix, add, matmul, product, zero};
pub(super) use memory::{Buffer, Out, View, address, ids_at, ids_beside, scratch};
pub(super) use weight_grad::deliver;

use candle_core::{CudaDevice, Device, Result, Tensor, bail};
use fsdp_kernels::Args;

/// The CUDA device that a tensor is on.
pub(super) fn device<'a>(op: &str, tensor: &'a Tensor) -> Result<&'a CudaDevice> {
    match tensor.device() {
        Device::Cuda(device) => Ok(device),
        _ => bail!("{op}: expected a tensor on a CUDA device"),
    }
}

/// Launches a kernel on candle's stream.
///
/// # Safety
/// `args` are those of the kernel `name`; what they point to is memory of `device` (views, outputs and new memory that are
/// alive), as large as the kernel takes it for, and what it writes is exclusively borrowed.
pub(super) unsafe fn launch<A: Args>(device: &CudaDevice, name: &'static str, args: &A) -> Result<()> {
    // SAFETY: the caller's promise; storage of candle, new memory and what a sink is open over may be used in the order of
    // this stream, and is given back in that order.
    unsafe { fsdp::cuda::launch(device, name, args) }
}

/// The gradient of an argument as a tensor of its shape.
pub(super) fn gradient(of: &Tensor, grad: Option<Buffer>) -> Option<Tensor> {
    grad.map(|grad| grad.into_tensor(of.shape()))
}
