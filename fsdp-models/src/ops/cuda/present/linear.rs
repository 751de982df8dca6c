//! The product with a weight, on a CUDA device.

use candle_core::{CudaStorage, Layout, Result, Shape, Tensor};

use crate::ops::cuda::present::{self as cuda, View, matmul, product};
use crate::ops::cuda::table::{CudaBackward, CudaForward};
use crate::ops::linear::{Linear, OP};
use crate::ops::storage::rows_and_width;

impl CudaForward<2> for Linear {
    fn on_cuda(
        &self,
        [(x, x_layout), (weight, weight_layout)]: [(&CudaStorage, &Layout); 2],
    ) -> Result<(CudaStorage, Shape)> {
        let (out, width) = weight_layout.shape().dims2()?;
        let mut dims = x_layout.dims().to_vec();
        dims.pop();
        let rows = dims.iter().product();
        dims.push(out);
        let x = View::new(OP, x, x_layout)?.matrix(rows, width);
        let weight = View::new(OP, weight, weight_layout)?.matrix(out, width);
        Ok((product(x, weight.t())?.into_storage(), Shape::from(dims)))
    }
}

impl CudaBackward<2> for Linear {
    fn bwd_on_cuda(&self, [x, weight]: [&Tensor; 2], dy: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let (out, width) = weight.dims2()?;
        let (rows, _) = rows_and_width(OP, x)?;
        let x_matrix = View::of(OP, x)?.matrix(rows, width);
        let dy = View::of(OP, dy)?.matrix(rows, out);
        let dweight =
            cuda::deliver(OP, weight, &self.sink, |dst, mode| matmul(dst, mode, 1.0, dy.t(), x_matrix))?;
        let dx = match x.track_op() {
            true => Some(product(dy, View::of(OP, weight)?.matrix(out, width))?),
            false => None,
        };
        Ok([cuda::gradient(x, dx), dweight])
    }
}
