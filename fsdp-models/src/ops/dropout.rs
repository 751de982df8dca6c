//! Dropout. Masks are drawn again in the backward, not kept.

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, WithDType, bail,
};
use fsdp::Scope;
use fsdp::random::RandomStream;

use super::cuda::is_captured;
use super::cuda::table::CudaForward;
use super::element::{Element, with_element};
use super::storage::{check_devices, dtype, elements};

pub(super) const OP: &str = "dropout";

/// `x` `[samples, ..]` with each element set to zero with probability `p`, and the others divided by `1 - p`; in
/// evaluation `x` itself.
///
/// The mask of a sample depends on the model's seed, the optimizer step, the unit and the call within it, and the
/// sample's index (see [`Fsdp::set_first_sample`](fsdp::Fsdp::set_first_sample)): it is drawn again, not kept, for
/// the backward and for recomputation.
///
/// # Errors
/// If `p` is not in `[0, 1)`, if `x` is not f32, bf16 or f16 or a scalar, or is not on the CPU or a CUDA
/// device; while a graph is captured, in training.
pub fn dropout(x: &Tensor, p: f64, scope: &Scope<'_>) -> Result<Tensor> {
    if !(0.0..1.0).contains(&p) {
        bail!("{OP}: the probability must be at least 0 and below 1, got {p}");
    }
    check_devices(OP, ("x", x), &[])?;
    if !matches!(x.dtype(), DType::F32 | DType::BF16 | DType::F16) {
        bail!("{OP}: expected f32, bf16 or f16, got {}", x.dtype().as_str());
    }
    let [samples, ..] = *x.dims() else { bail!("{OP}: expected at least one dim, got a scalar") };
    if !scope.is_training() {
        return Ok(x.clone());
    }
    // Drawn even where p is 0, so that what comes after does not depend on p.
    let stream = scope.random_stream();
    if p == 0.0 {
        return Ok(x.clone());
    }
    if is_captured(x.device()) {
        bail!("{OP}: a graph would repeat the mask of the step that is captured in every step");
    }
    apply(&x.contiguous()?, Dropout { p, stream, samples })
}

fn apply(x: &Tensor, op: Dropout) -> Result<Tensor> {
    if x.track_op() { x.apply_op1(op) } else { x.apply_op1_no_bwd(&op) }
}

#[derive(Clone, Copy)]
pub(super) struct Dropout {
    pub p: f64,
    pub stream: RandomStream,
    pub samples: usize,
}

impl Dropout {
    /// Random words below it drop their element.
    pub fn threshold(&self) -> u32 {
        (self.p * f64::from(u32::MAX)) as u32
    }

    /// Factor of the others.
    pub fn scale(&self) -> f32 {
        (1.0 / (1.0 - self.p)) as f32
    }

    fn dropped<T: Element>(&self, x: &[T]) -> Vec<T> {
        let mut values = T::widen(x).into_owned();
        if values.is_empty() {
            return T::narrow(values);
        }
        let (threshold, scale) = (self.threshold(), self.scale());
        let width = values.len() / self.samples;
        let mut words = vec![0; width];
        for (sample, values) in values.chunks_exact_mut(width).enumerate() {
            self.stream.fill(sample as u64, &mut words);
            for (value, &word) in values.iter_mut().zip(&words) {
                *value = if word < threshold { 0.0 } else { *value * scale };
            }
        }
        T::narrow(values)
    }
}

impl CustomOp1 for Dropout {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let storage = with_element!(OP, dtype(x), T => {
            T::to_cpu_storage_owned(self.dropped::<T>(elements(OP, x, layout)?))
        });
        Ok((storage, layout.shape().clone()))
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        self.on_cuda([(x, layout)])
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(apply(&grad.detach().contiguous()?, *self)?))
    }
}
