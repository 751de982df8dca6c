//! Causal attention on a CUDA device: products by cuBLAS, and a softmax between them.
//!
//! Heads are made the outer dim first: the query heads that share keys are then the rows of one matrix, and every product
//! is one call for all heads and sequences. The matrix of scores exists, in f32 and in the dtype of the arguments, for as
//! many heads at a time as make [`SCORES`] of them, at least for those that share keys. Unlike on the CPU the softmax
//! weights are rounded to the dtype of the arguments before they are multiplied, as the products want them.

use candle_core::{CudaStorage, Layout, Result, Shape, Tensor};
use fsdp::Accumulate;
use fsdp_kernels::{
    CausalSoftmaxArgs, CausalSoftmaxBackwardArgs, Dtype, SwapDimsArgs, causal_softmax,
    causal_softmax_backward, swap_dims,
};

use crate::ops::attention::{Attention, AttentionShape, OP};
use crate::ops::cuda::present::{self as cuda, Buffer, View, matmul};
use crate::ops::cuda::table::{CudaBackward, CudaForward};

/// Scores that exist at a time: 512 MiB of f32.
const SCORES: usize = 1 << 27;

/// Some of the key heads of all sequences, one after the other.
#[derive(Clone, Copy)]
struct Heads {
    start: usize,
    count: usize,
}

impl AttentionShape {
    /// Queries that see the keys of one key head.
    fn queries(self) -> usize {
        self.heads / self.kv_heads * self.t
    }

    /// All key heads, as many at a time as the scores allow.
    fn chunks(self) -> impl Iterator<Item = Heads> {
        let all = self.b * self.kv_heads;
        let at_once = (SCORES / (self.queries() * self.t).max(1)).clamp(1, all.max(1));
        (0..all).step_by(at_once).map(move |start| Heads { start, count: at_once.min(all - start) })
    }

    /// The queries of some heads, or what is of their size, of a part `[start, len]` of all.
    fn queries_of(self, heads: Heads) -> (usize, usize) {
        let size = self.queries() * self.dim;
        (heads.start * size, heads.count * size)
    }

    /// The same for keys.
    fn keys_of(self, heads: Heads) -> (usize, usize) {
        let size = self.t * self.dim;
        (heads.start * size, heads.count * size)
    }

    /// The same for log-sum-exps.
    fn rows_of(self, heads: Heads) -> (usize, usize) {
        (heads.start * self.queries(), heads.count * self.queries())
    }
}

/// `[b, t, heads * dim]` as `[b, heads, t, dim]`.
pub fn heads_first(x: View<'_>, shape: AttentionShape, heads: usize) -> Result<Buffer> {
    swapped(x, [shape.b, shape.t, heads, shape.dim])
}

/// `[b, heads, t, dim]` as `[b, t, heads * dim]`.
pub fn heads_last(x: View<'_>, shape: AttentionShape, heads: usize) -> Result<Buffer> {
    swapped(x, [shape.b, heads, shape.t, shape.dim])
}

fn swapped(x: View<'_>, [batch, first, second, width]: [usize; 4]) -> Result<Buffer> {
    assert_eq!(x.len(), batch * first * second * width);
    let mut to = Buffer::new(x.device(), x.dtype(), x.len())?;
    let args = SwapDimsArgs {
        from: x.at(),
        to: to.out().at(),
        batch: batch as u64,
        first: first as u64,
        second: second as u64,
        width: width as u64,
    };
    // SAFETY: the arguments of this kernel: both are as large as the dims say.
    unsafe { cuda::launch(x.device(), swap_dims(x.dtype()), &args) }?;
    Ok(to)
}

/// Attention's output `[b, heads, t, dim]` and the log-sum-exp of the scores, f32 `[b, heads, t]`. `q` is `[b, heads, t,
/// dim]`, `k` and `v` are `[b, kv_heads, t, dim]`.
pub fn forward(shape: AttentionShape, q: View<'_>, k: View<'_>, v: View<'_>) -> Result<(Buffer, Buffer)> {
    let (device, dtype) = (q.device(), q.dtype());
    let (queries, t, dim) = (shape.queries(), shape.t, shape.dim);
    let mut out = Buffer::new(device, dtype, q.len())?;
    let mut lse = Buffer::new(device, Dtype::F32, shape.b * shape.heads * t)?;
    for heads in shape.chunks() {
        let (q_part, k_part, rows) = (shape.queries_of(heads), shape.keys_of(heads), shape.rows_of(heads));
        let q = q.part(q_part.0, q_part.1).matrices(heads.count, queries, dim);
        let k = k.part(k_part.0, k_part.1).matrices(heads.count, t, dim);
        let v = v.part(k_part.0, k_part.1).matrices(heads.count, t, dim);
        let mut scores = Buffer::new(device, Dtype::F32, rows.1 * t)?;
        matmul(scores.out(), Accumulate::Overwrite, shape.scale(), q, k.t())?;
        let mut weights = Buffer::new(device, dtype, rows.1 * t)?;
        let args = CausalSoftmaxArgs {
            scores: scores.view().at(),
            weights: weights.out().at(),
            lse: lse.out_part(rows.0, rows.1).at(),
            rows: rows.1 as u64,
            positions: t as u64,
        };
        // SAFETY: the arguments of this kernel: scores and weights of all positions for each row, and its log-sum-exp.
        unsafe { cuda::launch(device, causal_softmax(dtype), &args) }?;
        drop(scores);
        let weights = weights.view().matrices(heads.count, queries, t);
        matmul(out.out_part(q_part.0, q_part.1), Accumulate::Overwrite, 1.0, weights, v)?;
    }
    Ok((out, lse))
}

/// The gradients of `q`, `k` and `v`, laid out as they are; `dout` is laid out as `q`.
pub fn backward(
    shape: AttentionShape,
    [q, k, v]: [View<'_>; 3],
    lse: View<'_>,
    dout: View<'_>,
) -> Result<[Buffer; 3]> {
    let (device, dtype) = (q.device(), q.dtype());
    let (queries, t, dim) = (shape.queries(), shape.t, shape.dim);
    let mut dq = Buffer::new(device, dtype, q.len())?;
    let mut dk = Buffer::new(device, dtype, k.len())?;
    let mut dv = Buffer::new(device, dtype, v.len())?;
    for heads in shape.chunks() {
        let (q_part, k_part, rows) = (shape.queries_of(heads), shape.keys_of(heads), shape.rows_of(heads));
        let q = q.part(q_part.0, q_part.1).matrices(heads.count, queries, dim);
        let dout = dout.part(q_part.0, q_part.1).matrices(heads.count, queries, dim);
        let k = k.part(k_part.0, k_part.1).matrices(heads.count, t, dim);
        let v = v.part(k_part.0, k_part.1).matrices(heads.count, t, dim);
        let mut scores = Buffer::new(device, Dtype::F32, rows.1 * t)?;
        matmul(scores.out(), Accumulate::Overwrite, shape.scale(), q, k.t())?;
        let mut dweights = Buffer::new(device, Dtype::F32, rows.1 * t)?;
        matmul(dweights.out(), Accumulate::Overwrite, 1.0, dout, v.t())?;
        let mut weights = Buffer::new(device, dtype, rows.1 * t)?;
        let mut dscores = Buffer::new(device, dtype, rows.1 * t)?;
        let args = CausalSoftmaxBackwardArgs {
            scores: scores.view().at(),
            lse: lse.part(rows.0, rows.1).at(),
            dweights: dweights.view().at(),
            weights: weights.out().at(),
            dscores: dscores.out().at(),
            rows: rows.1 as u64,
            positions: t as u64,
            scale: shape.scale(),
        };
        // SAFETY: the arguments of this kernel: four matrices of all positions for each row, and its log-sum-exp.
        unsafe { cuda::launch(device, causal_softmax_backward(dtype), &args) }?;
        drop((scores, dweights));
        let weights = weights.view().matrices(heads.count, queries, t);
        let dscores = dscores.view().matrices(heads.count, queries, t);
        matmul(dv.out_part(k_part.0, k_part.1), Accumulate::Overwrite, 1.0, weights.t(), dout)?;
        matmul(dq.out_part(q_part.0, q_part.1), Accumulate::Overwrite, 1.0, dscores, k)?;
        matmul(dk.out_part(k_part.0, k_part.1), Accumulate::Overwrite, 1.0, dscores.t(), q)?;
    }
    Ok([dq, dk, dv])
}

impl Attention {
    /// Queries, keys and values, heads first.
    fn arranged(&self, [q, k, v]: [View<'_>; 3]) -> Result<[Buffer; 3]> {
        let AttentionShape { heads, kv_heads, .. } = self.shape;
        Ok([
            heads_first(q, self.shape, heads)?,
            heads_first(k, self.shape, kv_heads)?,
            heads_first(v, self.shape, kv_heads)?,
        ])
    }
}

impl CudaForward<3> for Attention {
    fn on_cuda(&self, [q, k, v]: [(&CudaStorage, &Layout); 3]) -> Result<(CudaStorage, Shape)> {
        let shape = q.1.shape().clone();
        let [q, k, v] =
            self.arranged([View::new(OP, q.0, q.1)?, View::new(OP, k.0, k.1)?, View::new(OP, v.0, v.1)?])?;
        let (out, lse) = forward(self.shape, q.view(), k.view(), v.view())?;
        self.lse.set(lse);
        Ok((heads_last(out.view(), self.shape, self.shape.heads)?.into_storage(), shape))
    }
}

impl CudaBackward<3> for Attention {
    fn bwd_on_cuda(&self, [q, k, v]: [&Tensor; 3], dout: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let lse: &Buffer = self.lse.get(OP)?;
        let AttentionShape { heads, kv_heads, .. } = self.shape;
        let arranged = self.arranged([View::of(OP, q)?, View::of(OP, k)?, View::of(OP, v)?])?;
        let dout = heads_first(View::of(OP, dout)?, self.shape, heads)?;
        let [dq, dk, dv] =
            backward(self.shape, arranged.each_ref().map(Buffer::view), lse.view(), dout.view())?;
        let wanted = |arg: &Tensor, grad: Buffer, heads| match arg.track_op() {
            true => {
                heads_last(grad.view(), self.shape, heads).map(|grad| Some(grad.into_tensor(arg.shape())))
            }
            false => Ok(None),
        };
        Ok([wanted(q, dq, heads)?, wanted(k, dk, kv_heads)?, wanted(v, dv, kv_heads)?])
    }
}
