//! Llama's attention with its projections, on a CUDA device.

use candle_core::{CudaStorage, Layout, Result, Shape, Tensor};
use fsdp::Accumulate;

use crate::ops::cuda::present::attention::{backward, forward, heads_first, heads_last};
use crate::ops::cuda::present::rope::{Heads, rotate_in_place};
use crate::ops::cuda::present::{self as cuda, Buffer, View, matmul, product};
use crate::ops::cuda::table::{CudaBackward, CudaForward};
use crate::ops::rope::Turn;
use crate::ops::self_attention::{OP, SelfAttention};

/// What backward needs of forward.
struct Saved {
    /// Queries and keys, rotated, and values, each `[b, heads, t, dim]`.
    projected: [Buffer; 3],
    /// `[b, t, heads * dim]`.
    heads_out: Buffer,
    lse: Buffer,
}

impl SelfAttention {
    fn turn_on_cuda(&self, x: &mut Buffer, heads: usize, turn: Turn) -> Result<()> {
        rotate_in_place(OP, x, Heads { cos: &self.cos, sin: &self.sin, heads }, turn)
    }

    /// Heads of queries, keys and values, and whether they are turned by their positions.
    fn projections(&self) -> [(&Tensor, usize, bool); 3] {
        let (heads, kv_heads) = (self.shape.heads, self.shape.kv_heads);
        let [q, k, v] = &self.weights;
        [(q, heads, true), (k, kv_heads, true), (v, kv_heads, false)]
    }
}

impl CudaForward<3> for SelfAttention {
    fn on_cuda(&self, [x, _, o_weight]: [(&CudaStorage, &Layout); 3]) -> Result<(CudaStorage, Shape)> {
        let rows = self.rows();
        let x = View::new(OP, x.0, x.1)?;
        let project = |(weight, heads, turned): (&Tensor, usize, bool)| {
            let (width, dim) = weight.dims2()?;
            let weight = View::of(OP, weight)?.matrix(width, dim);
            let mut projected = product(x.matrix(rows, dim), weight.t())?;
            if turned {
                self.turn_on_cuda(&mut projected, heads, Turn::Forward)?;
            }
            heads_first(projected.view(), self.shape, heads)
        };
        let [q, k, v] = self.projections();
        let projected = [project(q)?, project(k)?, project(v)?];
        let [q, k, v] = projected.each_ref().map(Buffer::view);
        let (heads_out, lse) = forward(self.shape, q, k, v)?;
        let heads_out = heads_last(heads_out.view(), self.shape, self.shape.heads)?;

        let (out, width) = o_weight.1.shape().dims2()?;
        let o_weight = View::new(OP, o_weight.0, o_weight.1)?.matrix(out, width);
        let y = product(heads_out.view().matrix(rows, width), o_weight.t())?;
        self.saved.set(Saved { projected, heads_out, lse });
        Ok((y.into_storage(), Shape::from((self.shape.b, self.shape.t, out))))
    }
}

impl CudaBackward<3> for SelfAttention {
    fn bwd_on_cuda(&self, [x, argument, o_weight]: [&Tensor; 3], dy: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let Saved { projected, heads_out, lse } = self.saved.get(OP)?;
        let rows = self.rows();
        let (out, width) = o_weight.dims2()?;
        let dy = View::of(OP, dy)?.matrix(rows, out);
        let heads_out = heads_out.view().matrix(rows, width);
        let do_weight =
            cuda::deliver(OP, o_weight, &self.o_sink, |dst, mode| matmul(dst, mode, 1.0, dy.t(), heads_out))?;
        let dheads_out = product(dy, View::of(OP, o_weight)?.matrix(out, width))?;
        let dheads_out = heads_first(dheads_out.view(), self.shape, self.shape.heads)?;
        let grads =
            backward(self.shape, projected.each_ref().map(Buffer::view), lse.view(), dheads_out.view())?;
        drop(dheads_out);

        let x_view = View::of(OP, x)?;
        let mut weights = Vec::with_capacity(3);
        let mut dx: Option<Buffer> = None;
        for (((weight, heads, turned), sink), grad) in
            self.projections().into_iter().zip(&self.sinks).zip(grads)
        {
            let (width, dim) = weight.dims2()?;
            let mut grad = heads_last(grad.view(), self.shape, heads)?;
            if turned {
                self.turn_on_cuda(&mut grad, heads, Turn::Back)?;
            }
            let grad = grad.view().matrix(rows, width);
            let x_matrix = x_view.matrix(rows, dim);
            weights.push(cuda::deliver(OP, weight, sink, |dst, mode| {
                matmul(dst, mode, 1.0, grad.t(), x_matrix)
            })?);
            if x.track_op() {
                let weight = View::of(OP, weight)?.matrix(width, dim);
                match &mut dx {
                    None => dx = Some(product(grad, weight)?),
                    Some(dx) => matmul(dx.out(), Accumulate::Add, 1.0, grad, weight)?,
                }
            }
        }
        Ok([cuda::gradient(x, dx), self.bundle.leave(argument, weights)?, do_weight])
    }
}
