//! Root-mean-square normalisation on a CUDA device.

use candle_core::{CudaStorage, Layout, Result, Shape, Tensor};
use fsdp::Accumulate;
use fsdp_kernels::{
    ColumnSumsArgs, Dtype, RmsNormArgs, RmsNormBackwardArgs, column_sums, rms_norm, rms_norm_backward,
};

use crate::ops::cuda::present::{self as cuda, Buffer, View};
use crate::ops::cuda::table::{CudaBackward, CudaForward};
use crate::ops::rms_norm::{OP, RmsNorm};
use crate::ops::storage::rows_and_width;

impl CudaForward<2> for RmsNorm {
    fn on_cuda(
        &self,
        [(x, layout), (weight, weight_layout)]: [(&CudaStorage, &Layout); 2],
    ) -> Result<(CudaStorage, Shape)> {
        let (x, weight) = (View::new(OP, x, layout)?, View::new(OP, weight, weight_layout)?);
        let (device, width) = (x.device(), weight.len());
        let rows = x.len().checked_div(width).unwrap_or(0);
        let mut y = Buffer::new(device, x.dtype(), x.len())?;
        let mut scales = Buffer::new(device, Dtype::F32, rows)?;
        let args = RmsNormArgs {
            x: x.at(),
            weight: weight.at(),
            y: y.out().at(),
            scales: scales.out().at(),
            rows: rows as u64,
            width: width as u64,
            eps: self.eps,
        };
        // SAFETY: the arguments of this kernel: rows of the weight's length, a scale for each.
        unsafe { cuda::launch(device, rms_norm(x.dtype()), &args) }?;
        self.scales.set(scales);
        Ok((y.into_storage(), layout.shape().clone()))
    }
}

impl CudaBackward<2> for RmsNorm {
    fn bwd_on_cuda(&self, [x, weight]: [&Tensor; 2], dy: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let scales: &Buffer = self.scales.get(OP)?;
        let (rows, width) = rows_and_width(OP, x)?;
        let (x_view, weight_view, dy) = (View::of(OP, x)?, View::of(OP, weight)?, View::of(OP, dy)?);
        let (device, dtype) = (x_view.device(), x_view.dtype());
        let partial_rows = RmsNormBackwardArgs::partial_rows(rows as u64);
        let mut partials = Buffer::new(device, Dtype::F32, partial_rows as usize * width)?;
        let mut dx = match x.track_op() {
            true => Some(Buffer::new(device, dtype, x_view.len())?),
            false => None,
        };
        let args = RmsNormBackwardArgs::new(
            [x_view.at(), weight_view.at(), dy.at(), scales.view().at()],
            dx.as_mut().map_or(0, |dx| dx.out().at()),
            partials.out().at(),
            rows as u64,
            width as u64,
        );
        // SAFETY: the arguments of this kernel: `x`, `dy` and `dx` of one shape, a scale for each row, partial sums for
        // each group of rows.
        unsafe { cuda::launch(device, rms_norm_backward(dtype), &args) }?;
        let dweight = cuda::deliver(OP, weight, &self.sink, |dst, mode| {
            let args = ColumnSumsArgs {
                values: partials.view().at(),
                out: dst.at(),
                rows: partial_rows,
                width: width as u64,
                add: u32::from(mode == Accumulate::Add),
            };
            // SAFETY: the arguments of this kernel: rows as wide as `dst`, which has the weight's length.
            unsafe { cuda::launch(device, column_sums(dst.dtype()), &args) }
        })?;
        Ok([cuda::gradient(x, dx), dweight])
    }
}
