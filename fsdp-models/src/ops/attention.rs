//! Causal grouped-query attention. The score matrix of the whole batch never exists.

use candle_core::{CpuStorage, CudaStorage, CustomOp3, Layout, Result, Shape, Tensor, WithDType, bail};
use fsdp::Accumulate;

use super::cuda::table::{CudaBackward, CudaForward};
use super::element::{Element, with_element};
use super::exp::exp;
use super::kept::Kept;
use super::matmul::{Mat, MatMut, matmul};
use super::simd::{dot, filled_by, max, sum, vectorise};
use super::storage::{check_devices, check_dtypes, dtype, elements, with_elements};
use super::weight_grad::tensor;

pub(super) const OP: &str = "attention";

/// Queries taken at once against all keys that they see: large enough for the matrix products to run at
/// speed, small enough that little is computed above the diagonal.
const BLOCK: usize = 64;

/// Causal attention: `q` is `[b, t, heads * d]`, `k` and `v` are `[b, t, kv_heads * d]`, the result is `[b,
/// t, heads * d]`.
///
/// Query `i` sees keys `0..=i`; scores are scaled by `d^-1/2`; query head `h` uses key head `h / (heads /
/// kv_heads)`. Softmax is taken in f32. On the CPU scores exist for one head and one block of queries at a time, on a CUDA
/// device for all queries of some heads; for backward only their log-sum-exp is kept, one f32 a query and head.
///
/// # Errors
/// If the shapes do not fit, if `heads` is no multiple of `kv_heads`, if the dtypes differ or are not f32,
/// bf16 or f16, or if the tensors are not all on the CPU or on one CUDA device.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, heads: usize, kv_heads: usize) -> Result<Tensor> {
    check_devices(OP, ("q", q), &[("k", k), ("v", v)])?;
    check_dtypes(OP, ("q", q), ("k", k))?;
    check_dtypes(OP, ("q", q), ("v", v))?;
    let [b, t, width] = *q.dims() else {
        bail!("{OP}: expected q of [b, t, heads * d], got {:?}", q.dims());
    };
    let shape = AttentionShape::new(OP, b, t, width, heads, kv_heads)?;
    if k.dims() != [b, t, shape.kv_width()] || v.dims() != k.dims() {
        bail!(
            "{OP}: k {:?} and v {:?} do not fit q {:?}: expected {:?}",
            k.dims(),
            v.dims(),
            q.dims(),
            [b, t, shape.kv_width()]
        );
    }
    let op = Attention { shape, lse: Kept::default() };
    let (q, k, v) = (q.contiguous()?, k.contiguous()?, v.contiguous()?);
    if q.track_op() || k.track_op() || v.track_op() {
        q.apply_op3(&k, &v, op)
    } else {
        q.apply_op3_no_bwd(&k, &v, &op)
    }
}

#[derive(Clone, Copy)]
pub(super) struct AttentionShape {
    pub b: usize,
    pub t: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
}

impl AttentionShape {
    /// Fails unless `width` is that of `heads` heads, a multiple of `kv_heads`.
    pub fn new(op: &str, b: usize, t: usize, width: usize, heads: usize, kv_heads: usize) -> Result<Self> {
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            bail!("{op}: {heads} query heads are no multiple of {kv_heads} key heads");
        }
        if width == 0 || !width.is_multiple_of(heads) {
            bail!("{op}: queries of width {width} are not {heads} heads");
        }
        Ok(AttentionShape { b, t, heads, kv_heads, dim: width / heads })
    }

    pub fn q_width(self) -> usize {
        self.heads * self.dim
    }

    pub fn kv_width(self) -> usize {
        self.kv_heads * self.dim
    }

    pub fn scale(self) -> f32 {
        (1.0 / (self.dim as f64).sqrt()) as f32
    }

    /// Where head `head`'s queries of sequence `b` from `row` on begin.
    fn q_at(self, b: usize, row: usize, head: usize) -> usize {
        (b * self.t + row) * self.q_width() + head * self.dim
    }

    /// Where the keys of sequence `b` that go with query head `head` begin.
    fn kv_at(self, b: usize, head: usize) -> usize {
        b * self.t * self.kv_width() + head / (self.heads / self.kv_heads) * self.dim
    }

    /// Each (sequence, head, query block) with its rows and the number of keys that they see.
    fn blocks(self) -> impl Iterator<Item = Block> {
        (0..self.b).flat_map(move |b| {
            (0..self.heads).flat_map(move |head| {
                (0..self.t).step_by(BLOCK).map(move |start| {
                    let keys = (start + BLOCK).min(self.t);
                    Block { b, head, start, rows: keys - start, keys }
                })
            })
        })
    }
}

struct Block {
    b: usize,
    head: usize,
    start: usize,
    rows: usize,
    keys: usize,
}

/// Attention's output and the log-sum-exp of the scores, `[b, heads, t]`.
pub(super) fn forward(shape: AttentionShape, q: &[f32], k: &[f32], v: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let AttentionShape { b, t, heads, dim, .. } = shape;
    let (q_width, kv_width) = (shape.q_width(), shape.kv_width());
    let mut scores = vec![0.0; BLOCK.min(t) * t];
    let mut weighted = vec![0.0; BLOCK.min(t) * dim];
    let mut sums = vec![0.0; BLOCK];
    let mut lse = vec![0.0; b * heads * t];
    // SAFETY: the blocks visit every row of every head, and each writes its whole part of the output below.
    let out = unsafe {
        filled_by(b * t * q_width, |out| {
            for Block { b, head, start, rows, keys } in shape.blocks() {
                let scores = &mut scores[..rows * keys];
                let weighted = &mut weighted[..rows * dim];
                let q = Mat::strided(&q[shape.q_at(b, start, head)..], rows, dim, q_width);
                let k = Mat::strided(&k[shape.kv_at(b, head)..], keys, dim, kv_width);
                let v = Mat::strided(&v[shape.kv_at(b, head)..], keys, dim, kv_width);
                matmul(MatMut::new(scores, rows, keys), Accumulate::Overwrite, shape.scale(), q, k.t());
                let lse = &mut lse[(b * heads + head) * t + start..][..rows];
                softmax(scores, keys, start, &mut sums, lse);
                matmul(
                    MatMut::new(weighted, rows, dim),
                    Accumulate::Overwrite,
                    1.0,
                    Mat::new(scores, rows, keys),
                    v,
                );
                for ((row, weighted), sum) in weighted.chunks_exact(dim).enumerate().zip(&sums) {
                    let out = &mut out[shape.q_at(b, start + row, head)..][..dim];
                    let inverse = 1.0 / sum;
                    for (out, weighted) in out.iter_mut().zip(weighted) {
                        out.write(weighted * inverse);
                    }
                }
            }
        })
    };
    (out, lse)
}

/// Turns the scores of queries `start..` into `exp(score - largest)`, zero above the diagonal; gives each
/// row's sum and log-sum-exp.
fn softmax(scores: &mut [f32], keys: usize, start: usize, sums: &mut [f32], lse: &mut [f32]) {
    vectorise(
        #[inline(always)]
        || {
            let rows = scores.chunks_exact_mut(keys).zip(sums).zip(lse);
            for (row, ((scores, total), lse)) in rows.enumerate() {
                let (seen, unseen) = scores.split_at_mut(start + row + 1);
                let max = max(seen);
                for score in seen.iter_mut() {
                    *score = exp(*score - max);
                }
                unseen.fill(0.0);
                *total = sum(seen);
                *lse = max + total.ln();
            }
        },
    );
}

/// The gradients of `q`, `k` and `v`.
pub(super) fn backward(
    shape: AttentionShape,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    out: &[f32],
    lse: &[f32],
    dout: &[f32],
) -> [Vec<f32>; 3] {
    let AttentionShape { b, t, heads, dim, .. } = shape;
    let (q_width, kv_width) = (shape.q_width(), shape.kv_width());
    let mut weights = vec![0.0; BLOCK.min(t) * t];
    let mut dscores = vec![0.0; BLOCK.min(t) * t];
    let mut deltas = vec![0.0; BLOCK];
    let mut dk = vec![0.0; b * t * kv_width];
    let mut dv = vec![0.0; b * t * kv_width];
    // SAFETY: the blocks visit every row of every head, and each overwrites its whole part of `dq`.
    let dq = unsafe {
        filled_by(b * t * q_width, |dq| {
            for Block { b, head, start, rows, keys } in shape.blocks() {
                let weights = &mut weights[..rows * keys];
                let dscores = &mut dscores[..rows * keys];
                let (q_at, kv_at) = (shape.q_at(b, start, head), shape.kv_at(b, head));
                let q = Mat::strided(&q[q_at..], rows, dim, q_width);
                let k = Mat::strided(&k[kv_at..], keys, dim, kv_width);
                let v = Mat::strided(&v[kv_at..], keys, dim, kv_width);
                let block_dout = Mat::strided(&dout[q_at..], rows, dim, q_width);
                matmul(MatMut::new(weights, rows, keys), Accumulate::Overwrite, shape.scale(), q, k.t());
                matmul(MatMut::new(dscores, rows, keys), Accumulate::Overwrite, 1.0, block_dout, v.t());
                row_products(&out[q_at..], &dout[q_at..], dim, q_width, &mut deltas[..rows]);
                let lse = &lse[(b * heads + head) * t + start..][..rows];
                softmax_backward(weights, dscores, keys, start, lse, &deltas, shape.scale());
                let weights = Mat::new(weights, rows, keys);
                let dscores = Mat::new(dscores, rows, keys);
                matmul(
                    MatMut::strided(&mut dv[kv_at..], keys, dim, kv_width),
                    Accumulate::Add,
                    1.0,
                    weights.t(),
                    block_dout,
                );
                matmul(
                    MatMut::uninit(&mut dq[q_at..], rows, dim, q_width),
                    Accumulate::Overwrite,
                    1.0,
                    dscores,
                    k,
                );
                matmul(
                    MatMut::strided(&mut dk[kv_at..], keys, dim, kv_width),
                    Accumulate::Add,
                    1.0,
                    dscores.t(),
                    q,
                );
            }
        })
    };
    [dq, dk, dv]
}

/// The scalar product of each row of `a` with that of `b`, rows of `dim` elements `stride` apart.
fn row_products(a: &[f32], b: &[f32], dim: usize, stride: usize, products: &mut [f32]) {
    vectorise(
        #[inline(always)]
        || {
            for (row, product) in products.iter_mut().enumerate() {
                *product = dot(&a[row * stride..][..dim], &b[row * stride..][..dim]);
            }
        },
    );
}

/// Turns scores into softmax weights, and the weights' gradients into those of the unscaled scores; both zero
/// above the diagonal.
fn softmax_backward(
    weights: &mut [f32],
    dscores: &mut [f32],
    keys: usize,
    start: usize,
    lse: &[f32],
    deltas: &[f32],
    scale: f32,
) {
    vectorise(
        #[inline(always)]
        || {
            let rows = weights.chunks_exact_mut(keys).zip(dscores.chunks_exact_mut(keys));
            for (row, (((weights, dscores), &lse), &delta)) in rows.zip(lse).zip(deltas).enumerate() {
                let (weights, unseen) = weights.split_at_mut(start + row + 1);
                unseen.fill(0.0);
                let (dscores, unseen) = dscores.split_at_mut(start + row + 1);
                unseen.fill(0.0);
                for (weight, dscore) in weights.iter_mut().zip(dscores) {
                    *weight = exp(*weight - lse);
                    *dscore = *weight * (*dscore - delta) * scale;
                }
            }
        },
    );
}

pub(super) struct Attention {
    pub shape: AttentionShape,
    /// Log-sum-exp of each query's scores.
    pub lse: Kept,
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let out = with_element!(OP, dtype(q), T => {
            let q = T::widen(elements(OP, q, q_layout)?);
            let k = T::widen(elements(OP, k, k_layout)?);
            let v = T::widen(elements(OP, v, v_layout)?);
            let (out, lse) = forward(self.shape, &q, &k, &v);
            self.lse.set(lse);
            T::to_cpu_storage_owned(T::narrow(out))
        });
        Ok((out, q_layout.shape().clone()))
    }

    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.on_cuda([(q, q_layout), (k, k_layout), (v, v_layout)])
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let dout = dout.contiguous()?;
        if q.device().is_cuda() {
            let [dq, dk, dv] = self.bwd_on_cuda([q, k, v], &dout)?;
            return Ok((dq, dk, dv));
        }
        let lse: &Vec<f32> = self.lse.get(OP)?;
        let [dq, dk, dv] = with_element!(OP, q.dtype(), T => {
            with_elements::<T, _>(OP, q, |q| with_elements::<T, _>(OP, k, |k| {
                with_elements::<T, _>(OP, v, |v| with_elements::<T, _>(OP, out, |out| {
                    with_elements::<T, _>(OP, &dout, |dout| {
                        let (q, k, v) = (T::widen(q), T::widen(k), T::widen(v));
                        Ok(backward(self.shape, &q, &k, &v, &T::widen(out), lse, &T::widen(dout)))
                    })
                }))
            }))?
        });
        let wanted = |arg: &Tensor, grad| {
            if arg.track_op() { tensor(OP, grad, arg.shape(), arg.dtype()).map(Some) } else { Ok(None) }
        };
        Ok((wanted(q, dq)?, wanted(k, dk)?, wanted(v, dv)?))
    }
}
