//! Cross-entropy on a CUDA device.

use std::sync::OnceLock;

use candle_core::{CudaStorage, DType, Layout, Result, Shape, Tensor, bail};
use fsdp_kernels::{
    CrossEntropyArgs, CrossEntropyBackwardArgs, DevicePtr, Dtype, NO_IGNORED_TARGET, SumArgs, cross_entropy,
    cross_entropy_backward, sum_f64,
};

use super::{CrossEntropy, OP};
use crate::ops::cuda::{self, Buffer, View, address, ids_at, scratch};

/// What the op has on the logits' device, if that is a CUDA device.
pub struct State {
    targets: Option<Tensor>,
    ignored: i64,
    statistics: OnceLock<Statistics>,
}

/// Of each row: its largest logit, and the sum of `exp(logit - largest)`.
struct Statistics {
    maxima: Buffer,
    sums: Buffer,
}

impl State {
    pub fn new(logits: &Tensor, targets: &Tensor, ignored: Option<u32>) -> Result<Self> {
        let ignored = ignored.map_or(NO_IGNORED_TARGET, i64::from);
        Ok(State { targets: cuda::ids_beside(OP, targets, logits)?, ignored, statistics: OnceLock::new() })
    }

    /// Address of the targets.
    fn targets_at(&self, rows: usize) -> Result<DevicePtr> {
        match &self.targets {
            Some(targets) => ids_at(OP, targets, rows),
            None => bail!("{OP}: the targets are not on a CUDA device"),
        }
    }
}

impl CrossEntropy {
    pub(super) fn on_cuda(&self, logits: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (rows, vocab) = layout.shape().dims2()?;
        let logits = View::new(OP, logits, layout)?;
        let device = logits.device();
        let losses = scratch::<f64>(device, rows)?;
        let mut maxima = Buffer::new(device, Dtype::F32, rows)?;
        let mut sums = Buffer::new(device, Dtype::F32, rows)?;
        let args = CrossEntropyArgs {
            logits: logits.at(),
            targets: self.on_cuda.targets_at(rows)?,
            losses: address(device, &losses),
            maxima: maxima.out().at(),
            sums: sums.out().at(),
            rows: rows as u64,
            vocab: vocab as u64,
            ignored: self.on_cuda.ignored,
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
        let _ = self.on_cuda.statistics.set(Statistics { maxima, sums });
        Ok((loss.into_storage(), Shape::from(())))
    }

    pub(super) fn bwd_on_cuda(&self, logits: &Tensor, dloss: &Tensor) -> Result<Option<Tensor>> {
        let Some(saved) = self.on_cuda.statistics.get() else { bail!("{OP}: backward before forward") };
        let (rows, vocab) = logits.dims2()?;
        let dloss = dloss.to_dtype(DType::F32)?.contiguous()?;
        let view = View::of(OP, logits)?;
        let mut dlogits = Buffer::new(view.device(), view.dtype(), view.len())?;
        let args = CrossEntropyBackwardArgs {
            logits: view.at(),
            targets: self.on_cuda.targets_at(rows)?,
            maxima: saved.maxima.view().at(),
            sums: saved.sums.view().at(),
            dlogits: dlogits.out().at(),
            dloss: View::of(OP, &dloss)?.at(),
            rows: rows as u64,
            vocab: vocab as u64,
            ignored: self.on_cuda.ignored,
            divisor: self.divisor,
        };
        // SAFETY: the arguments of this kernel: those of forward, a gradient of the logits' size, and one f32.
        unsafe { cuda::launch(view.device(), cross_entropy_backward(view.dtype()), &args) }?;
        Ok(Some(dlogits.into_tensor(logits.shape())))
    }
}
