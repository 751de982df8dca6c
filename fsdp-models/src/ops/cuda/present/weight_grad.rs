//! Passes a weight's gradient on, on a device: into an open sink, or back to candle.

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::{CudaStorage, Layout, Result, Shape, Tensor, bail};
use fsdp::spec::Dtype;
use fsdp::{Accumulate, GradSink, Slice};

use super::memory::{Buffer, Out, View};
use crate::ops::cuda::table::CudaForward;
use crate::ops::weight_grad::Node;

/// Delivers a weight's gradient, which `compute` writes into memory of the weight's size, or adds to what is there; it is
/// of the bucket's dtype, or of the weight's.
///
/// Returns what the op's `bwd` must return for the weight, as on the CPU.
pub fn deliver(
    op: &str,
    weight: &Tensor,
    sink: &GradSink,
    compute: impl Fn(Out<'_>, Accumulate) -> Result<()>,
) -> Result<Option<Tensor>> {
    let (numel, device) = (weight.elem_count(), super::device(op, weight)?);
    let leaf = weight.is_variable() || !weight.track_op();
    let write = |slice: &Slice, mode| {
        if slice.len() != numel {
            bail!(
                "{op}: the sink of the weight {:?} holds {} elements, expected {numel}",
                weight.dims(),
                slice.len()
            );
        }
        if slice.is_host() {
            bail!("{op}: the sink of the weight {:?} is on the CPU, the weight is not", weight.dims());
        }
        let dtype = match slice.dtype() {
            Dtype::F32 => fsdp_kernels::Dtype::F32,
            Dtype::BF16 => fsdp_kernels::Dtype::BF16,
            Dtype::F16 => fsdp_kernels::Dtype::F16,
        };
        // SAFETY: the engine opens the sink over a part of a bucket on the weight's device that belongs to the
        // compute stream, which is candle's, until it closes the sink, which it cannot while this closure runs.
        compute(unsafe { Out::new(device, slice.as_ptr().addr() as u64, numel, dtype) }, mode)
    };
    // SAFETY: `compute` enqueues its work on candle's stream of the weight's device, by the contract of `Out`; nothing keeps
    // the slice.
    if leaf && unsafe { sink.accumulate_slice(write) }? {
        return Ok(None);
    }
    if !weight.track_op() {
        return Ok(None);
    }
    let mut grad = Buffer::new(device, View::of(op, weight)?.dtype(), numel)?;
    compute(grad.out(), Accumulate::Overwrite)?;
    Ok(Some(grad.into_tensor(weight.shape())))
}

impl<const ARGS: usize> CudaForward<ARGS> for Node {
    fn on_cuda(&self, args: [(&CudaStorage, &Layout); ARGS]) -> Result<(CudaStorage, Shape)> {
        let device = args[0].0.device.clone();
        let slice = CudaStorageSlice::F32(device.alloc_zeros(1)?);
        Ok((CudaStorage { slice, device }, Shape::from(1)))
    }
}
