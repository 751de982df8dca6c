//! Building blocks of the ops on CUDA devices: elements in device memory, matrix products, kernel launches.
//!
//! All work goes to candle's stream of the arguments' device, in program order. candle allocates and frees storage in the
//! order of that stream too: what an op drops after it has submitted its work is used again only after that work.

mod attention;
mod cross_entropy;
mod dropout;
mod embedding;
mod gated_mlp;
mod gemm;
mod linear;
mod memory;
mod rms_norm;
mod rope;
mod self_attention;
mod swiglu;
mod weight_grad;

use gemm::{Matrix, add, matmul, product, zero};
pub(in crate::ops) use memory::ids_beside;
use memory::{Buffer, Out, View, address, ids_at, scratch};
use weight_grad::deliver;

use candle_core::cuda_backend::cudarc::driver::sys::CUstreamCaptureStatus;
use candle_core::{CudaDevice, Device, Result, Tensor, bail};
use fsdp_kernels::Args;

use super::table;

table::each!(table::implemented);

/// Ops compute on CUDA devices.
pub(in crate::ops) const BUILT: bool = true;

/// Whether work on a device is captured as a graph now.
pub(in crate::ops) fn is_captured(device: &Device) -> bool {
    let Device::Cuda(device) = device else { return false };
    let status = device.cuda_stream().capture_status();
    status.is_ok_and(|status| status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Whether work on the tensors of two candle devices at one place is in one order.
pub(in crate::ops) fn same_stream(a: &Device, b: &Device) -> bool {
    match (a, b) {
        (Device::Cuda(a), Device::Cuda(b)) => a.cuda_stream().cu_stream() == b.cuda_stream().cu_stream(),
        _ => true,
    }
}

/// The CUDA device that a tensor is on.
fn device<'a>(op: &str, tensor: &'a Tensor) -> Result<&'a CudaDevice> {
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
unsafe fn launch<A: Args>(device: &CudaDevice, name: &'static str, args: &A) -> Result<()> {
    // SAFETY: the caller's promise; storage of candle, new memory and what a sink is open over may be used in the order of
    // this stream, and is given back in that order.
    unsafe { fsdp::cuda::launch(device, name, args) }
}

/// The gradient of an argument as a tensor of its shape.
fn gradient(of: &Tensor, grad: Option<Buffer>) -> Option<Tensor> {
    grad.map(|grad| grad.into_tensor(of.shape()))
}
