//! Root-mean-square normalisation.

use std::mem::MaybeUninit;

use candle_core::{CpuStorage, CudaStorage, CustomOp2, Layout, Result, Shape, Tensor, WithDType, bail};
use fsdp::GradSink;

use super::cuda::table::{CudaBackward, CudaForward};
use super::element::{Element, with_element};
use super::kept::Kept;
use super::simd::{dot, dot3, filled_by, vectorise};
use super::storage::{check_devices, check_dtypes, dtype, elements, rows_and_width, with_elements};
use super::weight_grad::{deliver, store, tensor};

pub(super) const OP: &str = "rms-norm";

/// `weight * round(x / sqrt(mean(x²) + eps))` over the last dim: `x` is `[.., dim]`, `weight` `[dim]`.
///
/// The statistics are taken in f32; as in Hugging Face's Llama, the normalised value is rounded to the dtype
/// of `x` before it is multiplied by the weight.
///
/// # Errors
/// If the shapes do not fit, if the dtypes differ or are not f32, bf16 or f16, or if the tensors are not
/// all on the CPU or on one CUDA device.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64, sink: &GradSink) -> Result<Tensor> {
    check_devices(OP, ("x", x), &[("the weight", weight)])?;
    check(OP, x, weight)?;
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    let op = RmsNorm { eps: eps as f32, scales: Kept::default(), sink: sink.clone() };
    if x.track_op() || weight.track_op() {
        x.apply_op2(&weight, op)
    } else {
        x.apply_op2_no_bwd(&weight, &op)
    }
}

fn check(op: &str, x: &Tensor, weight: &Tensor) -> Result<()> {
    check_dtypes(op, ("x", x), ("the weight", weight))?;
    let (_, width) = rows_and_width(op, x)?;
    if weight.dims() != [width] {
        bail!(
            "{op}: x {:?} does not fit the weight {:?}: expected [.., dim] and [dim]",
            x.dims(),
            weight.dims()
        );
    }
    Ok(())
}

pub(super) struct RmsNorm {
    pub eps: f32,
    /// `1 / sqrt(mean(x²) + eps)` of each row.
    pub scales: Kept,
    pub sink: GradSink,
}

/// Writes the normalised rows, every element of `out`, and returns each row's scale.
///
/// # Panics
/// If `x` is no whole number of rows of the weight's length, or `out` has another length.
fn forward<T: Element>(x: &[f32], weight: &[f32], eps: f32, out: &mut [MaybeUninit<f32>]) -> Vec<f32> {
    let width = weight.len();
    assert!(x.len().is_multiple_of(width) && out.len() == x.len(), "rows of another width than the weight");
    if width == 0 {
        return Vec::new();
    }
    let mut scales = Vec::with_capacity(x.len() / width);
    vectorise(
        #[inline(always)]
        || {
            for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
                let scale = 1.0 / (dot(x, x) / width as f32 + eps).sqrt();
                for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                    out.write(weight * T::round(x * scale));
                }
                scales.push(scale);
            }
        },
    );
    scales
}

/// Writes the gradient of `x`, every element of `dx`, and adds up that of the weight in `dweight`.
///
/// # Panics
/// If the lengths do not fit, or there is not a scale for each row.
fn backward<T: Element>(
    x: &[f32],
    weight: &[f32],
    scales: &[f32],
    dy: &[f32],
    dx: &mut [MaybeUninit<f32>],
    dweight: &mut [f32],
) {
    let width = weight.len();
    assert!(x.len().is_multiple_of(width), "rows of another width than the weight");
    assert!(dy.len() == x.len() && dx.len() == x.len(), "gradients of another length");
    if width == 0 {
        return;
    }
    assert!(scales.len() == x.len() / width, "a scale for each row");
    vectorise(
        #[inline(always)]
        || {
            let rows = x.chunks_exact(width).zip(dy.chunks_exact(width)).zip(dx.chunks_exact_mut(width));
            for (((x, dy), dx), &scale) in rows.zip(scales) {
                let (x, dy) = (&x[..width], &dy[..width]);
                let (dx, dweight) = (&mut dx[..width], &mut dweight[..width]);
                // With n = x scale: dx = scale (dn - n mean(dn n)), dn = dy weight.
                let mean = dot3(dy, weight, x) * scale / width as f32;
                for i in 0..width {
                    let normal = x[i] * scale;
                    dweight[i] += dy[i] * T::round(normal);
                    dx[i].write(scale * (dy[i] * weight[i] - normal * mean));
                }
            }
        },
    );
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let y = with_element!(OP, dtype(x), T => {
            let x = T::widen(elements(OP, x, x_layout)?);
            let weight = T::widen(elements(OP, weight, weight_layout)?);
            // SAFETY: `forward` writes every element.
            let y = unsafe {
                filled_by(x.len(), |out| {
                    self.scales.set(forward::<T>(&x, &weight, self.eps, out));
                })
            };
            T::to_cpu_storage_owned(T::narrow(y))
        });
        Ok((y, x_layout.shape().clone()))
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        weight: &CudaStorage,
        weight_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.on_cuda([(x, x_layout), (weight, weight_layout)])
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let dy = dy.contiguous()?;
        if x.device().is_cuda() {
            let [dx, dweight] = self.bwd_on_cuda([x, weight], &dy)?;
            return Ok((dx, dweight));
        }
        let scales: &Vec<f32> = self.scales.get(OP)?;
        let mut dweight = vec![0.0; weight.elem_count()];
        let dx = with_element!(OP, x.dtype(), T => with_elements::<T, _>(OP, x, |x| {
            with_elements::<T, _>(OP, weight, |weight| with_elements::<T, _>(OP, &dy, |dy| {
                let (x, weight, dy) = (T::widen(x), T::widen(weight), T::widen(dy));
                // SAFETY: `backward` writes every element.
                Ok(unsafe {
                    filled_by(x.len(), |dx| backward::<T>(&x, &weight, scales, &dy, dx, &mut dweight))
                })
            }))
        })?);
        let dweight = deliver(OP, weight, &self.sink, |dst, mode| {
            store(dst, mode, &dweight);
            Ok(())
        })?;
        let dx = if x.track_op() { Some(tensor(OP, dx, x.shape(), x.dtype())?) } else { None };
        Ok((dx, dweight))
    }
}
