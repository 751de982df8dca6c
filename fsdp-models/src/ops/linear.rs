//! The product with a weight: `x wᵀ`.

use candle_core::{CpuStorage, CudaStorage, CustomOp2, Layout, Result, Shape, Tensor, WithDType, bail};
use fsdp::GradSink;

use super::cuda::table::{CudaBackward, CudaForward};
use super::element::{Element, with_element};
use super::matmul::{Mat, MatMut, matmul, product};
use super::storage::{check_devices, check_dtypes, dtype, elements, rows_and_width, with_elements};
use super::weight_grad::{deliver, tensor};

pub(super) const OP: &str = "linear";

/// `x wᵀ`: `x` is `[.., in]`, `weight` `[out, in]`, the result `[.., out]`.
///
/// # Errors
/// If the shapes do not fit, if the dtypes differ or are not f32, bf16 or f16, or if the tensors are not
/// all on the CPU or on one CUDA device.
pub fn linear(x: &Tensor, weight: &Tensor, sink: &GradSink) -> Result<Tensor> {
    check_devices(OP, ("x", x), &[("the weight", weight)])?;
    check(OP, x, weight)?;
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    if x.track_op() || weight.track_op() {
        x.apply_op2(&weight, Linear { sink: sink.clone() })
    } else {
        x.apply_op2_no_bwd(&weight, &Linear { sink: sink.clone() })
    }
}

/// Fails unless `weight` is `[out, in]` for an `x` of `[.., in]`, in one dtype.
pub(super) fn check(op: &str, x: &Tensor, weight: &Tensor) -> Result<()> {
    check_dtypes(op, ("x", x), ("the weight", weight))?;
    let (_, width) = rows_and_width(op, x)?;
    if weight.rank() != 2 || weight.dims()[1] != width {
        bail!(
            "{op}: x {:?} does not fit the weight {:?}: expected [.., in] and [out, in]",
            x.dims(),
            weight.dims()
        );
    }
    Ok(())
}

pub(super) struct Linear {
    pub sink: GradSink,
}

impl CustomOp2 for Linear {
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
        let (out, width) = weight_layout.shape().dims2()?;
        let mut dims = x_layout.dims().to_vec();
        dims.pop();
        let rows = dims.iter().product();
        dims.push(out);
        let y = with_element!(OP, dtype(x), T => {
            let x = T::widen(elements(OP, x, x_layout)?);
            let weight = T::widen(elements(OP, weight, weight_layout)?);
            let y = product(Mat::new(&x, rows, width), Mat::new(&weight, out, width).t());
            T::to_cpu_storage_owned(T::narrow(y))
        });
        Ok((y, Shape::from(dims)))
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
        let (out, width) = weight.dims2()?;
        let (rows, _) = rows_and_width(OP, x)?;
        with_element!(OP, x.dtype(), T => with_elements::<T, _>(OP, &dy, |dy| {
            let dy = T::widen(dy);
            let dy = Mat::new(&dy, rows, out);
            let dweight = deliver(OP, weight, &self.sink, |dst, mode| {
                with_elements::<T, _>(OP, x, |x| {
                    let x = T::widen(x);
                    matmul(MatMut::new(dst, out, width), mode, 1.0, dy.t(), Mat::new(&x, rows, width));
                    Ok(())
                })
            })?;
            let dx = if x.track_op() {
                let dx = with_elements::<T, _>(OP, weight, |weight| {
                    Ok(product(dy, Mat::new(&T::widen(weight), out, width)))
                })?;
                Some(tensor(OP, dx, x.shape(), x.dtype())?)
            } else {
                None
            };
            Ok((dx, dweight))
        }))
    }
}
