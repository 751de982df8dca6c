//! Dropout on a CUDA device, with the masks of the CPU.

use candle_core::{CudaStorage, Layout, Result, Shape};
use fsdp_kernels::{DropoutArgs, dropout};

use super::{Dropout, OP};
use crate::ops::cuda::{self, Buffer, View};

impl Dropout {
    pub(super) fn on_cuda(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let x = View::new(OP, x, layout)?;
        let mut y = Buffer::new(x.device(), x.dtype(), x.len())?;
        if x.len() > 0 {
            let args = DropoutArgs {
                x: x.at(),
                y: y.out().at(),
                samples: self.samples as u64,
                width: (x.len() / self.samples) as u64,
                key: self.stream.key(),
                first_sample: self.stream.first_sample(),
                threshold: self.threshold(),
                scale: self.scale(),
            };
            // SAFETY: the arguments of this kernel: the samples cover `x`, and `y` is as large.
            unsafe { cuda::launch(x.device(), dropout(x.dtype()), &args) }?;
        }
        Ok((y.into_storage(), layout.shape().clone()))
    }
}
