//! Rotary position embedding.

use std::mem::MaybeUninit;

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, WithDType, bail,
};

use super::cuda::table::{CudaBackward, CudaForward};
use super::element::{Element, with_element};
use super::simd::{filled_by, vectorise};
use super::storage::{check_devices, dtype, elements, with_elements};
use super::weight_grad::tensor;

pub(super) const OP: &str = "rope";

/// Rotates each head of `x` `[b, t, heads * head_dim]` by its position's angles: `cos` and `sin` are f32 `[t,
/// head_dim / 2]` and get no gradient.
///
/// The pairs are those of Hugging Face's Llama: element `i` of a head goes with element `i + head_dim / 2`.
///
/// # Errors
/// If the shapes do not fit, if `cos` or `sin` is not f32, if `x` is not f32, bf16 or f16, or if the
/// tensors are not all on the CPU or on one CUDA device.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor, heads: usize) -> Result<Tensor> {
    check_devices(OP, ("x", x), &[("cos", cos), ("sin", sin)])?;
    let [_, t, width] = *x.dims() else {
        bail!("{OP}: expected x of [b, t, heads * head_dim], got {:?}", x.dims());
    };
    if heads == 0 || !width.is_multiple_of(2 * heads) {
        bail!("{OP}: the last dim of x {:?} is not {heads} heads of even size", x.dims());
    }
    check_angles(OP, cos, sin, t, width / heads)?;
    let op = Rope { cos: cos.detach().contiguous()?, sin: sin.detach().contiguous()?, heads };
    let x = x.contiguous()?;
    if x.track_op() { x.apply_op1(op) } else { x.apply_op1_no_bwd(&op) }
}

/// Fails unless `cos` and `sin` are f32 `[t, head_dim / 2]`.
pub(super) fn check_angles(op: &str, cos: &Tensor, sin: &Tensor, t: usize, head_dim: usize) -> Result<()> {
    let half = head_dim / 2;
    if cos.dims() != [t, half] || sin.dims() != [t, half] {
        bail!(
            "{op}: cos {:?} and sin {:?} do not fit {t} positions and heads of {head_dim}: expected {:?}",
            cos.dims(),
            sin.dims(),
            [t, half]
        );
    }
    if cos.dtype() != DType::F32 || sin.dtype() != DType::F32 {
        bail!("{op}: cos is {}, sin is {}: expected f32", cos.dtype().as_str(), sin.dtype().as_str());
    }
    Ok(())
}

pub(super) struct Rope {
    pub cos: Tensor,
    pub sin: Tensor,
    pub heads: usize,
}

/// Which way to turn: backward is the inverse, which is the transpose.
#[derive(Clone, Copy)]
pub(super) enum Turn {
    Forward,
    Back,
}

impl Turn {
    pub fn sign(self) -> f32 {
        match self {
            Turn::Forward => 1.0,
            Turn::Back => -1.0,
        }
    }
}

/// One pair, turned by an angle.
#[inline(always)]
fn turned(low: f32, high: f32, cos: f32, sin: f32) -> (f32, f32) {
    (low * cos - high * sin, high * cos + low * sin)
}

/// Turns rows of heads of `2 * half` elements where they are; `cos` and `sin` are those of the rows'
/// positions, repeated as often as there are sequences.
pub(super) fn rotate_in_place(
    x: &mut [f32],
    cos: &[f32],
    sin: &[f32],
    half: usize,
    heads: usize,
    turn: Turn,
) {
    if x.is_empty() {
        return;
    }
    vectorise(
        #[inline(always)]
        || {
            let angles = cos.chunks_exact(half).zip(sin.chunks_exact(half)).cycle();
            for (x, (cos, sin)) in x.chunks_exact_mut(heads * 2 * half).zip(angles) {
                for head in x.chunks_exact_mut(2 * half) {
                    let (low, high) = head.split_at_mut(half);
                    for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                        (*low, *high) = turned(*low, *high, *cos, turn.sign() * sin);
                    }
                }
            }
        },
    );
}

/// Rotates `x` into new memory: writes every element of `out`.
///
/// # Panics
/// If the lengths do not fit, or there are no angles.
fn rotate(
    x: &[f32],
    cos: &[f32],
    sin: &[f32],
    half: usize,
    heads: usize,
    turn: Turn,
    out: &mut [MaybeUninit<f32>],
) {
    if x.is_empty() {
        return;
    }
    let width = heads * 2 * half;
    assert!(width > 0 && x.len().is_multiple_of(width) && out.len() == x.len(), "rows of another width");
    assert!(cos.len() >= half && sin.len() >= half, "angles of no position");
    vectorise(
        #[inline(always)]
        || {
            let angles = cos.chunks_exact(half).zip(sin.chunks_exact(half)).cycle();
            let rows = x.chunks_exact(width).zip(out.chunks_exact_mut(width));
            for ((x, out), (cos, sin)) in rows.zip(angles) {
                for (x, out) in x.chunks_exact(2 * half).zip(out.chunks_exact_mut(2 * half)) {
                    let (x_low, x_high) = x.split_at(half);
                    let (low, high) = out.split_at_mut(half);
                    for i in 0..half {
                        let pair = turned(x_low[i], x_high[i], cos[i], turn.sign() * sin[i]);
                        low[i].write(pair.0);
                        high[i].write(pair.1);
                    }
                }
            }
        },
    );
}

impl Rope {
    fn apply(&self, x: &[f32], turn: Turn) -> Result<Vec<f32>> {
        let (_, half) = self.cos.dims2()?;
        with_elements(OP, &self.cos, |cos| {
            with_elements(OP, &self.sin, |sin| {
                // SAFETY: `rotate` writes every element.
                Ok(unsafe { filled_by(x.len(), |out| rotate(x, cos, sin, half, self.heads, turn, out)) })
            })
        })
    }
}

impl CustomOp1 for Rope {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let y = with_element!(OP, dtype(x), T => {
            let x = T::widen(elements(OP, x, layout)?);
            T::to_cpu_storage_owned(T::narrow(self.apply(&x, Turn::Forward)?))
        });
        Ok((y, layout.shape().clone()))
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        self.on_cuda([(x, layout)])
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let dy = dy.contiguous()?;
        if x.device().is_cuda() {
            let [dx] = self.bwd_on_cuda([x], &dy)?;
            return Ok(dx);
        }
        let dx = with_element!(OP, dy.dtype(), T => {
            with_elements::<T, _>(OP, &dy, |dy| self.apply(&T::widen(dy), Turn::Back))?
        });
        tensor(OP, dx, x.shape(), x.dtype()).map(Some)
    }
}
