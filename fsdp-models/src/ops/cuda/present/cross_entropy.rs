//! Cross-entropy on a CUDA device.

use candle_core::{CudaStorage, DType, Layout, Result, Shape, Tensor, bail};
use fsdp_kernels::{
    CrossEntropyArgs, CrossEntropyBackwardArgs, DevicePtr, Dtype, NO_IGNORED_TARGET, SumArgs, cross_entropy,
    cross_entropy_backward, sum_f64,
};

use crate::ops::cross_entropy::{CrossEntropy, OP};
use crate::ops::cuda::present::{self as cuda, Buffer, View, address, ids_at, scratch};
use crate::ops::cuda::table::{CudaBackward, CudaForward};

/// Of each row: its largest logit, and the sum of `exp(logit - largest)`.
struct Statistics {
    maxima: Buffer,
    sums: Buffer,
}

impl CrossEntropy {
    /// Address of the targets, and the one that is ignored.
    fn cuda_targets(&self, rows: usize) -> Result<(DevicePtr, i64)> {
        let Some(targets) = &self.on_device else { bail!("{OP}: the targets are not on a CUDA device") };
        Ok((ids_at(OP, targets, rows)?, self.ignored.map_or(NO_IGNORED_TARGET, i64::from)))
    }
}

impl CudaForward<1> for CrossEntropy {
    fn on_cuda(&self, [(logits, layout)]: [(&CudaStorage, &Layout); 1]) -> Result<(CudaStorage, Shape)> {
        let (targets, ignored) = self.cuda_targets(layout.shape().dims2()?.0)?;
        let (rows, vocab) = layout.shape().dims2()?;
        let logits = View::new(OP, logits, layout)?;
        let device = logits.device();
        let losses = scratch::<f64>(device, rows)?;
        let mut maxima = Buffer::new(device, Dtype::F32, rows)?;
        let mut sums = Buffer::new(device, Dtype::F32, rows)?;
        let args = CrossEntropyArgs {
            logits: logits.at(),
            targets,
            losses: address(device, &losses),
            maxima: maxima.out().at(),
            sums: sums.out().at(),
            rows: rows as u64,
            vocab: vocab as u64,
            ignored,
        };
        // SAFETY: the arguments of this kernel: a target, a loss and two statistics for each row of logits.
        unsafe { cuda::launch(device, cross_entropy(logits.dtype()), &args) }?;
        let mut loss = Buffer::new(device, Dtype::F32, 1)?;
        let args = SumArgs {
            values: address(device, &losses),
            total: 0,
            rounded: loss.out().at(),
            len: rows as u64,
            divisor: self.divisor,
        };
        // SAFETY: the arguments of this kernel: the losses, which were just written, and one f32.
        unsafe { cuda::launch(device, sum_f64(), &args) }?;
        self.statistics.set(Statistics { maxima, sums });
        Ok((loss.into_storage(), Shape::from(())))
    }
}

impl CudaBackward<1> for CrossEntropy {
    fn bwd_on_cuda(&self, [logits]: [&Tensor; 1], dloss: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let saved: &Statistics = self.statistics.get(OP)?;
        let (rows, vocab) = logits.dims2()?;
        let (targets, ignored) = self.cuda_targets(rows)?;
        let dloss = dloss.to_dtype(DType::F32)?.contiguous()?;
        let view = View::of(OP, logits)?;
        let mut dlogits = Buffer::new(view.device(), view.dtype(), view.len())?;
        let args = CrossEntropyBackwardArgs {
            logits: view.at(),
            targets,
            maxima: saved.maxima.view().at(),
            sums: saved.sums.view().at(),
            dlogits: dlogits.out().at(),
            dloss: View::of(OP, &dloss)?.at(),
            rows: rows as u64,
            vocab: vocab as u64,
            ignored,
            divisor: self.divisor,
        };
        // SAFETY: the arguments of this kernel: those of forward, a gradient of the logits' size, and one f32.
        unsafe { cuda::launch(view.device(), cross_entropy_backward(view.dtype()), &args) }?;
        Ok([Some(dlogits.into_tensor(logits.shape()))])
    }
}
