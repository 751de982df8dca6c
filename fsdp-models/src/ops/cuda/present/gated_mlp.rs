//! Llama's MLP on a CUDA device.

use candle_core::{CudaStorage, Layout, Result, Shape, Tensor, bail};
use fsdp::{Accumulate, GradSink};

use crate::ops::cuda::present::swiglu::{backward as swiglu_backward, forward as swiglu};
use crate::ops::cuda::present::{self as cuda, Buffer, Matrix, View, matmul, product};
use crate::ops::cuda::table::{CudaBackward, CudaForward};
use crate::ops::gated_mlp::{GatedMlp, OP};
use crate::ops::storage::rows_and_width;

impl CudaForward<2> for GatedMlp {
    fn on_cuda(&self, [(x, layout), _]: [(&CudaStorage, &Layout); 2]) -> Result<(CudaStorage, Shape)> {
        let [gate_weight, up_weight, down_weight] = &self.weights;
        let (hidden, dim) = gate_weight.dims2()?;
        let (out, _) = down_weight.dims2()?;
        let mut dims = layout.dims().to_vec();
        dims.pop();
        let rows = dims.iter().product();
        dims.push(out);
        let x = View::new(OP, x, layout)?.matrix(rows, dim);
        let project = |weight| product(x, View::of(OP, weight)?.matrix(hidden, dim).t());
        let (gate, up) = (project(gate_weight)?, project(up_weight)?);
        let inner = swiglu(gate.view(), up.view())?;
        let down = View::of(OP, down_weight)?.matrix(out, hidden);
        let y = product(inner.view().matrix(rows, hidden), down.t())?;
        self.activations.set([gate, up]);
        Ok((y.into_storage(), Shape::from(dims)))
    }
}

impl CudaBackward<2> for GatedMlp {
    fn bwd_on_cuda(&self, [x, weights]: [&Tensor; 2], dy: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let [gate, up]: &[Buffer; 2] = self.activations.get(OP)?;
        let [gate_weight, up_weight, down_weight] = &self.weights;
        let (hidden, dim) = gate_weight.dims2()?;
        let (out, _) = down_weight.dims2()?;
        let (rows, _) = rows_and_width(OP, x)?;
        let x_matrix = View::of(OP, x)?.matrix(rows, dim);
        let dy = View::of(OP, dy)?.matrix(rows, out);
        let deliver = |weight: &Tensor, sink: &GradSink, a: Matrix<'_>, b: Matrix<'_>| {
            cuda::deliver(OP, weight, sink, |dst, mode| matmul(dst, mode, 1.0, a.t(), b))
        };
        let [gate_sink, up_sink, down_sink] = &self.sinks;

        let inner = swiglu(gate.view(), up.view())?;
        let ddown = deliver(down_weight, down_sink, dy, inner.view().matrix(rows, hidden))?;
        drop(inner);
        let dinner = product(dy, View::of(OP, down_weight)?.matrix(out, hidden))?;
        let [Some(dgate), Some(dup)] = swiglu_backward(gate.view(), up.view(), dinner.view(), [true; 2])?
        else {
            bail!("{OP}: a gradient is missing")
        };
        drop(dinner);
        let (dgate, dup) = (dgate.view().matrix(rows, hidden), dup.view().matrix(rows, hidden));
        let dgate_weight = deliver(gate_weight, gate_sink, dgate, x_matrix)?;
        let dup_weight = deliver(up_weight, up_sink, dup, x_matrix)?;

        let dx = if x.track_op() {
            let mut dx: Buffer = product(dgate, View::of(OP, gate_weight)?.matrix(hidden, dim))?;
            let up_weight = View::of(OP, up_weight)?.matrix(hidden, dim);
            matmul(dx.out(), Accumulate::Add, 1.0, dup, up_weight)?;
            Some(dx)
        } else {
            None
        };
        Ok([cuda::gradient(x, dx), self.bundle.leave(weights, vec![dgate_weight, dup_weight, ddown])?])
    }
}
