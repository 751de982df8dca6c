//! The gated activation of Llama's MLP.

use std::mem::MaybeUninit;

use candle_core::{CpuStorage, CudaStorage, CustomOp2, Layout, Result, Shape, Tensor, WithDType, bail};

use super::cuda::table::{CudaBackward, CudaForward};
use super::element::{Element, with_element};
use super::exp::sigmoid;
use super::simd::{filled_by, vectorise};
use super::storage::{check_devices, check_dtypes, dtype, elements, with_elements};
use super::weight_grad::tensor;

pub(super) const OP: &str = "swiglu";

/// `silu(gate) * up`, element by element, for two tensors of one shape.
///
/// # Errors
/// If the shapes or dtypes differ, if the dtype is not f32, bf16 or f16, or if the tensors are not all on
/// the CPU or on one CUDA device.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    check_devices(OP, ("gate", gate), &[("up", up)])?;
    check_dtypes(OP, ("gate", gate), ("up", up))?;
    if gate.dims() != up.dims() {
        bail!("{OP}: gate is {:?}, but up is {:?}", gate.dims(), up.dims());
    }
    let (gate, up) = (gate.contiguous()?, up.contiguous()?);
    if gate.track_op() || up.track_op() {
        gate.apply_op2(&up, Swiglu)
    } else {
        gate.apply_op2_no_bwd(&up, &Swiglu)
    }
}

pub(super) struct Swiglu;

/// `silu(gate) * up`; writes every element of `out`.
///
/// # Panics
/// If the lengths differ.
pub(super) fn forward(gate: &[f32], up: &[f32], out: &mut [MaybeUninit<f32>]) {
    assert!(gate.len() == out.len() && up.len() == out.len(), "gate and up of other lengths than the output");
    vectorise(
        #[inline(always)]
        || {
            for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                out.write(gate * sigmoid(*gate) * up);
            }
        },
    );
}

/// The gradients of gate and up for the gradient `dy` of `silu(gate) * up`.
#[inline(always)]
pub(super) fn gradients(gate: f32, up: f32, dy: f32) -> (f32, f32) {
    let s = sigmoid(gate);
    let silu = gate * s;
    // The derivative of silu: s (1 + gate (1 - s)).
    (dy * up * (silu * (1.0 - s) + s), dy * silu)
}

impl CustomOp2 for Swiglu {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        gate_layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let y = with_element!(OP, dtype(gate), T => {
            let gate = T::widen(elements(OP, gate, gate_layout)?);
            let up = T::widen(elements(OP, up, up_layout)?);
            // SAFETY: `forward` writes every element.
            let y = unsafe { filled_by(gate.len(), |out| forward(&gate, &up, out)) };
            T::to_cpu_storage_owned(T::narrow(y))
        });
        Ok((y, gate_layout.shape().clone()))
    }

    fn cuda_fwd(
        &self,
        gate: &CudaStorage,
        gate_layout: &Layout,
        up: &CudaStorage,
        up_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.on_cuda([(gate, gate_layout), (up, up_layout)])
    }

    fn bwd(
        &self,
        gate: &Tensor,
        up: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let dy = dy.contiguous()?;
        if gate.device().is_cuda() {
            let [dgate, dup] = self.bwd_on_cuda([gate, up], &dy)?;
            return Ok((dgate, dup));
        }
        let (dgate, dup) = with_element!(OP, gate.dtype(), T => with_elements::<T, _>(OP, gate, |gate| {
            with_elements::<T, _>(OP, up, |up| with_elements::<T, _>(OP, &dy, |dy| {
                let (gate, up, dy) = (T::widen(gate), T::widen(up), T::widen(dy));
                let mut dup = Vec::new();
                assert!(up.len() == gate.len() && dy.len() == gate.len(), "tensors of different lengths");
                // SAFETY: all five have the length of `gate`, three as was checked and two as they are made here, so that
                // the loop writes each element of both outputs.
                let dgate = unsafe {
                    filled_by(gate.len(), |dgate| {
                        dup = filled_by(gate.len(), |dup| {
                            vectorise(
                                #[inline(always)]
                                || {
                                    let inputs = gate.iter().zip(up.iter()).zip(dy.iter());
                                    let outputs = dgate.iter_mut().zip(dup.iter_mut());
                                    for (((gate, up), dy), (dgate, dup)) in inputs.zip(outputs) {
                                        let (g, u) = gradients(*gate, *up, *dy);
                                        dgate.write(g);
                                        dup.write(u);
                                    }
                                },
                            )
                        });
                    })
                };
                Ok((dgate, dup))
            }))
        })?);
        let wanted = |arg: &Tensor, grad| {
            if arg.track_op() { tensor(OP, grad, arg.shape(), arg.dtype()).map(Some) } else { Ok(None) }
        };
        Ok((wanted(gate, dgate)?, wanted(up, dup)?))
    }
}
