//! Dropout on a CUDA device, with the masks of the CPU.

use candle_core::{CudaStorage, Layout, Result, Shape};
use fsdp_kernels::{DropoutArgs, dropout};

use crate::ops::cuda::present::{self as cuda, Buffer, View};
use crate::ops::cuda::table::CudaForward;
use crate::ops::dropout::{Dropout, OP};

impl CudaForward<1> for Dropout {
    fn on_cuda(&self, [(x, layout)]: [(&CudaStorage, &Layout); 1]) -> Result<(CudaStorage, Shape)> {
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
