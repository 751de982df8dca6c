//! Llama's MLP as one op: one edge in the graph, and one gradient of the input instead of one for each projection.

use candle_core::{CpuStorage, CudaStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};
use fsdp::{Accumulate, GradSink};

use super::cuda::table::{CudaBackward, CudaForward};
use super::element::{Element, with_element};
use super::kept::Kept;
use super::linear;
use super::matmul::{Mat, MatMut, matmul, product};
use super::simd::{filled_by, vectorise};
use super::storage::{check_devices, dtype, elements, rows_and_width, with_elements};
use super::swiglu::{forward as swiglu, gradients};
use super::weight_grad::{Bundle, deliver, tensor};

pub(super) const OP: &str = "gated-mlp";

/// `down(silu(gate(x)) * up(x))`: `x` is `[.., dim]`, `gate` and `up` are `[hidden, dim]`, `down` is `[dim,
/// hidden]`; `sinks` are those of gate, up and down.
///
/// The values equal those of [`linear`](super::linear()) and [`swiglu`](super::swiglu()) in sequence. The op keeps for
/// backward the outputs of gate and up.
///
/// # Errors
/// If the shapes do not fit, if the dtypes differ or are not f32, bf16 or f16, or if the tensors are not
/// all on the CPU or on one CUDA device.
pub fn gated_mlp(
    x: &Tensor,
    gate: &Tensor,
    up: &Tensor,
    down: &Tensor,
    sinks: [&GradSink; 3],
) -> Result<Tensor> {
    check_devices(OP, ("x", x), &[("gate", gate), ("up", up), ("down", down)])?;
    linear::check(OP, x, gate)?;
    linear::check(OP, x, up)?;
    super::storage::check_dtypes(OP, ("x", x), ("down", down))?;
    let (hidden, dim) = gate.dims2()?;
    if up.dims() != gate.dims() || down.rank() != 2 || down.dims()[1] != hidden {
        bail!(
            "{OP}: gate {:?}, up {:?} and down {:?} do not fit: expected {:?}, {:?} and [out, {hidden}]",
            gate.dims(),
            up.dims(),
            down.dims(),
            [hidden, dim],
            [hidden, dim]
        );
    }
    let (x, gate, up, down) = (x.contiguous()?, gate.contiguous()?, up.contiguous()?, down.contiguous()?);
    let (bundle, weights) = Bundle::new(&[&gate, &up, &down])?;
    let op = GatedMlp {
        weights: [gate, up, down],
        sinks: sinks.map(GradSink::clone),
        bundle,
        activations: Kept::default(),
    };
    if x.track_op() || weights.track_op() {
        x.apply_op2(&weights, op)
    } else {
        x.apply_op2_no_bwd(&weights, &op)
    }
}

pub(super) struct GatedMlp {
    /// Gate, up, down.
    pub weights: [Tensor; 3],
    pub sinks: [GradSink; 3],
    pub bundle: Bundle,
    /// The outputs of gate and up.
    pub activations: Kept,
}

struct Gradients {
    x: Option<Vec<f32>>,
    /// Those that no sink took.
    weights: Vec<Option<Tensor>>,
}

impl GatedMlp {
    fn forward<T: Element>(&self, x: &[T], rows: usize) -> Result<CpuStorage> {
        let [gate_weight, up_weight, down_weight] = &self.weights;
        let (hidden, dim) = gate_weight.dims2()?;
        let (out, _) = down_weight.dims2()?;
        let x = T::widen(x);
        let project = |weight: &Tensor| {
            with_elements::<T, _>(OP, weight, |weight| {
                let weight = T::widen(weight);
                Ok(T::narrow(product(Mat::new(&x, rows, dim), Mat::new(&weight, hidden, dim).t())))
            })
        };
        let (gate, up) = (project(gate_weight)?, project(up_weight)?);
        // SAFETY: `swiglu` writes every element.
        let inner = unsafe { filled_by(gate.len(), |out| swiglu(&T::widen(&gate), &T::widen(&up), out)) };
        let inner = T::narrow(inner);
        self.activations.set([T::to_cpu_storage_owned(gate), T::to_cpu_storage_owned(up)]);
        with_elements::<T, _>(OP, down_weight, |weight| {
            let (inner, weight) = (T::widen(&inner), T::widen(weight));
            let y = product(Mat::new(&inner, rows, hidden), Mat::new(&weight, out, hidden).t());
            Ok(T::to_cpu_storage_owned(T::narrow(y)))
        })
    }

    /// The gradient of `x`, if wanted, and those of the weights.
    fn backward<T: Element>(&self, x: &[T], rows: usize, dy: &[T], want_dx: bool) -> Result<Gradients> {
        let [gate, up]: &[CpuStorage; 2] = self.activations.get(OP)?;
        let [gate_weight, up_weight, down_weight] = &self.weights;
        let (hidden, dim) = gate_weight.dims2()?;
        let (out, _) = down_weight.dims2()?;
        let (x, dy) = (T::widen(x), T::widen(dy));
        let (x, dy) = (Mat::new(&x, rows, dim), Mat::new(&dy, rows, out));
        let (gate, up) = (T::widen(T::cpu_storage_as_slice(gate)?), T::widen(T::cpu_storage_as_slice(up)?));

        let dinner = with_elements::<T, _>(OP, down_weight, |weight| {
            Ok(product(dy, Mat::new(&T::widen(weight), out, hidden)))
        })?;
        let (inner, dgate, dup) = activation_backward::<T>(&gate, &up, dinner);
        let inner = Mat::new(&inner, rows, hidden);
        let dgate = Mat::new(&dgate, rows, hidden);
        let dup = Mat::new(&dup, rows, hidden);

        let [gate_sink, up_sink, down_sink] = &self.sinks;
        let deliver = |weight: &Tensor, sink, a: Mat<'_>, b: Mat<'_>| {
            let (rows, cols) = weight.dims2()?;
            deliver(OP, weight, sink, |dst, mode| {
                matmul(MatMut::new(dst, rows, cols), mode, 1.0, a.t(), b);
                Ok(())
            })
        };
        let ddown = deliver(down_weight, down_sink, dy, inner)?;
        let dgate_weight = deliver(gate_weight, gate_sink, dgate, x)?;
        let dup_weight = deliver(up_weight, up_sink, dup, x)?;

        let dx = if want_dx {
            let mut dx = with_elements::<T, _>(OP, gate_weight, |weight| {
                Ok(product(dgate, Mat::new(&T::widen(weight), hidden, dim)))
            })?;
            with_elements::<T, _>(OP, up_weight, |weight| {
                let weight = T::widen(weight);
                matmul(
                    MatMut::new(&mut dx, rows, dim),
                    Accumulate::Add,
                    1.0,
                    dup,
                    Mat::new(&weight, hidden, dim),
                );
                Ok(())
            })?;
            Some(dx)
        } else {
            None
        };
        Ok(Gradients { x: dx, weights: vec![dgate_weight, dup_weight, ddown] })
    }
}

/// `silu(gate) * up` again, and the gradients of gate and up; `dinner` becomes the latter.
fn activation_backward<T: Element>(
    gate: &[f32],
    up: &[f32],
    dinner: Vec<f32>,
) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    assert!(up.len() == gate.len() && dinner.len() == gate.len(), "activations of different lengths");
    let mut dup = dinner;
    let mut dgate = Vec::new();
    // SAFETY: all have the length of `gate`, three as was checked and two as they are made here, so that the loop writes each
    // element of both new vectors.
    let inner = unsafe {
        filled_by(gate.len(), |inner| {
            dgate = filled_by(gate.len(), |dgate| {
                vectorise(
                    #[inline(always)]
                    || {
                        let inputs = gate.iter().zip(up).zip(dup.iter_mut());
                        for (((gate, up), dup), (dgate, inner)) in inputs.zip(dgate.iter_mut().zip(inner)) {
                            let silu = *gate * super::exp::sigmoid(*gate);
                            inner.write(T::round(silu * up));
                            let (g, u) = gradients(*gate, *up, *dup);
                            dgate.write(g);
                            *dup = u;
                        }
                    },
                );
            });
        })
    };
    (inner, dgate, dup)
}

impl CustomOp2 for GatedMlp {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        layout: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let mut dims = layout.dims().to_vec();
        dims.pop();
        let rows = dims.iter().product();
        dims.push(self.weights[2].dims2()?.0);
        let y = with_element!(OP, dtype(x), T => self.forward::<T>(elements(OP, x, layout)?, rows)?);
        Ok((y, Shape::from(dims)))
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        layout: &Layout,
        weights: &CudaStorage,
        weights_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.on_cuda([(x, layout), (weights, weights_layout)])
    }

    fn bwd(
        &self,
        x: &Tensor,
        weights: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let dy = dy.contiguous()?;
        if x.device().is_cuda() {
            let [dx, dweights] = self.bwd_on_cuda([x, weights], &dy)?;
            return Ok((dx, dweights));
        }
        let (rows, _) = rows_and_width(OP, x)?;
        let want_dx = x.track_op();
        let grads = with_element!(OP, x.dtype(), T => {
            with_elements::<T, _>(OP, x, |x| with_elements::<T, _>(OP, &dy, |dy| {
                self.backward::<T>(x, rows, dy, want_dx)
            }))?
        });
        let dx = match grads.x {
            Some(dx) => Some(tensor(OP, dx, x.shape(), x.dtype())?),
            None => None,
        };
        Ok((dx, self.bundle.leave(weights, grads.weights)?))
    }
}
