//! The product with a weight, on a CUDA device.

use candle_core::{CudaStorage, Layout, Result, Shape, Tensor};

use super::{Linear, OP};
use crate::ops::cuda::{self, View, matmul, product};
use crate::ops::storage::rows_and_width;

impl Linear {
    pub(super) fn on_cuda(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        weight: &CudaStorage,
        weight_layout: &Layout,
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

    pub(super) fn bwd_on_cuda(
        &self,
        x: &Tensor,
        weight: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
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
        Ok((cuda::gradient(x, dx), dweight))
    }
}
