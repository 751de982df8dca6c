//! Llama's attention with its projections as one op: one edge in the graph, and no copies of gradients between its
//! steps.

use candle_core::{CpuStorage, CudaStorage, CustomOp3, Layout, Result, Shape, Tensor, bail};
use fsdp::{Accumulate, GradSink};

use super::attention::{self, AttentionShape};
use super::cuda::table::{CudaBackward, CudaForward};
use super::element::{Element, with_element};
use super::kept::Kept;
use super::linear;
use super::matmul::{Mat, MatMut, matmul, product};
use super::rope::{Turn, check_angles, rotate_in_place};
use super::storage::{check_devices, check_dtypes, dtype, elements, with_elements};
use super::weight_grad::{Bundle, deliver, tensor};

pub(super) const OP: &str = "self-attention";

/// The projections of [`self_attention`], each with its sink.
#[derive(Clone, Copy, Debug)]
pub struct SelfAttentionWeights<'a> {
    /// `[heads * d, dim]`.
    pub q: (&'a Tensor, &'a GradSink),
    /// `[kv_heads * d, dim]`.
    pub k: (&'a Tensor, &'a GradSink),
    /// `[kv_heads * d, dim]`.
    pub v: (&'a Tensor, &'a GradSink),
    /// `[out, heads * d]`.
    pub o: (&'a Tensor, &'a GradSink),
}

/// `o(attention(rope(q(x)), rope(k(x)), v(x)))`: `x` is `[b, t, dim]`, `cos` and `sin` are f32 `[t, d / 2]`,
/// the result is `[b, t, out]`.
///
/// The values equal those of [`linear`](super::linear()), [`rope`](super::rope()) and
/// [`attention`](super::attention()) in sequence. The op keeps for backward: the rotated queries and keys, the values, the
/// heads' outputs and the log-sum-exp of the scores.
///
/// # Errors
/// If the shapes do not fit, if `heads` is no multiple of `kv_heads`, if the dtypes differ or are not f32,
/// bf16 or f16 (`cos` and `sin`: f32), or if the tensors are not all on the CPU or on one CUDA device.
pub fn self_attention(
    x: &Tensor,
    weights: SelfAttentionWeights<'_>,
    cos: &Tensor,
    sin: &Tensor,
    heads: usize,
    kv_heads: usize,
) -> Result<Tensor> {
    let [b, t, _] = *x.dims() else {
        bail!("{OP}: expected x of [b, t, dim], got {:?}", x.dims());
    };
    let SelfAttentionWeights { q, k, v, o } = weights;
    check_devices(
        OP,
        ("x", x),
        &[("q", q.0), ("k", k.0), ("v", v.0), ("o", o.0), ("cos", cos), ("sin", sin)],
    )?;
    for weight in [q.0, k.0, v.0] {
        linear::check(OP, x, weight)?;
    }
    check_dtypes(OP, ("x", x), ("o", o.0))?;
    let shape = AttentionShape::new(OP, b, t, q.0.dims()[0], heads, kv_heads)?;
    let kv_width = shape.kv_width();
    if k.0.dims()[0] != kv_width || v.0.dims()[0] != kv_width {
        bail!(
            "{OP}: k {:?} and v {:?} do not fit q {:?}: expected {kv_width} rows",
            k.0.dims(),
            v.0.dims(),
            q.0.dims()
        );
    }
    if o.0.rank() != 2 || o.0.dims()[1] != shape.q_width() {
        bail!(
            "{OP}: o {:?} does not fit q {:?}: expected [out, {}]",
            o.0.dims(),
            q.0.dims(),
            shape.q_width()
        );
    }
    if !shape.dim.is_multiple_of(2) {
        bail!("{OP}: heads of odd size {} have no halves to rotate", shape.dim);
    }
    check_angles(OP, cos, sin, t, shape.dim)?;

    let x = x.contiguous()?;
    let inputs = [q.0.contiguous()?, k.0.contiguous()?, v.0.contiguous()?];
    let o_weight = o.0.contiguous()?;
    let (bundle, argument) = Bundle::new(&inputs.each_ref())?;
    let op = SelfAttention {
        shape,
        weights: inputs,
        sinks: [q.1.clone(), k.1.clone(), v.1.clone()],
        bundle,
        o_sink: o.1.clone(),
        cos: cos.detach().contiguous()?,
        sin: sin.detach().contiguous()?,
        saved: Kept::default(),
    };
    if x.track_op() || argument.track_op() || o_weight.track_op() {
        x.apply_op3(&argument, &o_weight, op)
    } else {
        x.apply_op3_no_bwd(&argument, &o_weight, &op)
    }
}

pub(super) struct SelfAttention {
    pub shape: AttentionShape,
    /// q, k, v.
    pub weights: [Tensor; 3],
    pub sinks: [GradSink; 3],
    pub bundle: Bundle,
    pub o_sink: GradSink,
    pub cos: Tensor,
    pub sin: Tensor,
    pub saved: Kept,
}

/// What backward needs of forward.
struct Saved {
    /// Queries and keys, rotated, and values.
    projected: [CpuStorage; 3],
    heads_out: CpuStorage,
    lse: Vec<f32>,
}

struct Gradients {
    x: Option<Vec<f32>>,
    /// Of q, k and v.
    weights: Vec<Option<Tensor>>,
    o: Option<Tensor>,
}

impl SelfAttention {
    pub fn rows(&self) -> usize {
        self.shape.b * self.shape.t
    }

    fn rotate(&self, x: &mut [f32], heads: usize, turn: Turn) -> Result<()> {
        with_elements(OP, &self.cos, |cos| {
            with_elements(OP, &self.sin, |sin| {
                rotate_in_place(x, cos, sin, self.shape.dim / 2, heads, turn);
                Ok(())
            })
        })
    }

    fn forward<T: Element>(&self, x: &[T], o_weight: &[T]) -> Result<CpuStorage> {
        let rows = self.rows();
        let x = T::widen(x);
        let project = |weight: &Tensor| {
            let (width, dim) = weight.dims2()?;
            with_elements::<T, _>(OP, weight, |weight| {
                let weight = T::widen(weight);
                Ok(product(Mat::new(&x, rows, dim), Mat::new(&weight, width, dim).t()))
            })
        };
        let rotated = |weight: &Tensor, heads| {
            let mut projected = T::round_all(project(weight)?);
            self.rotate(&mut projected, heads, Turn::Forward)?;
            Ok::<_, candle_core::Error>(T::narrow(projected))
        };
        let [q_weight, k_weight, v_weight] = &self.weights;
        let q = rotated(q_weight, self.shape.heads)?;
        let k = rotated(k_weight, self.shape.kv_heads)?;
        let v = T::narrow(project(v_weight)?);
        let (heads_out, lse) = attention::forward(self.shape, &T::widen(&q), &T::widen(&k), &T::widen(&v));
        let heads_out = T::narrow(heads_out);

        let width = self.shape.q_width();
        let out = o_weight.len() / width;
        let y = product(
            Mat::new(&T::widen(&heads_out), rows, width),
            Mat::new(&T::widen(o_weight), out, width).t(),
        );
        self.saved.set(Saved {
            projected: [q, k, v].map(T::to_cpu_storage_owned),
            heads_out: T::to_cpu_storage_owned(heads_out),
            lse,
        });
        Ok(T::to_cpu_storage_owned(T::narrow(y)))
    }

    fn backward<T: Element>(&self, x: &[T], o_weight: &Tensor, dy: &[T], want_dx: bool) -> Result<Gradients> {
        let Saved { projected: [q, k, v], heads_out, lse } = self.saved.get(OP)?;
        let (rows, width) = (self.rows(), self.shape.q_width());
        let (out, _) = o_weight.dims2()?;
        let (x, dy) = (T::widen(x), T::widen(dy));
        let dy = Mat::new(&dy, rows, out);
        let heads_out = T::widen(T::cpu_storage_as_slice(heads_out)?);
        let do_weight = deliver(OP, o_weight, &self.o_sink, |dst, mode| {
            matmul(MatMut::new(dst, out, width), mode, 1.0, dy.t(), Mat::new(&heads_out, rows, width));
            Ok(())
        })?;
        let dheads_out = with_elements::<T, _>(OP, o_weight, |weight| {
            Ok(product(dy, Mat::new(&T::widen(weight), out, width)))
        })?;

        let mut grads = attention::backward(
            self.shape,
            &T::widen(T::cpu_storage_as_slice(q)?),
            &T::widen(T::cpu_storage_as_slice(k)?),
            &T::widen(T::cpu_storage_as_slice(v)?),
            &heads_out,
            lse,
            &dheads_out,
        );
        self.rotate(&mut grads[0], self.shape.heads, Turn::Back)?;
        self.rotate(&mut grads[1], self.shape.kv_heads, Turn::Back)?;

        let mut weights = Vec::with_capacity(3);
        let mut dx: Option<Vec<f32>> = None;
        for ((weight, sink), grad) in self.weights.iter().zip(&self.sinks).zip(&grads) {
            let (width, dim) = weight.dims2()?;
            let grad = Mat::new(grad, rows, width);
            weights.push(deliver(OP, weight, sink, |dst, mode| {
                matmul(MatMut::new(dst, width, dim), mode, 1.0, grad.t(), Mat::new(&x, rows, dim));
                Ok(())
            })?);
            if want_dx {
                with_elements::<T, _>(OP, weight, |weight| {
                    let weight = T::widen(weight);
                    let weight = Mat::new(&weight, width, dim);
                    match &mut dx {
                        None => dx = Some(product(grad, weight)),
                        Some(dx) => matmul(MatMut::new(dx, rows, dim), Accumulate::Add, 1.0, grad, weight),
                    }
                    Ok(())
                })?;
            }
        }
        Ok(Gradients { x: dx, weights, o: do_weight })
    }
}

impl CustomOp3 for SelfAttention {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        _: &CpuStorage,
        _: &Layout,
        o_weight: &CpuStorage,
        o_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (out, _) = o_layout.shape().dims2()?;
        let y = with_element!(OP, dtype(x), T => {
            self.forward::<T>(elements(OP, x, x_layout)?, elements(OP, o_weight, o_layout)?)?
        });
        Ok((y, Shape::from((self.shape.b, self.shape.t, out))))
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        argument: &CudaStorage,
        argument_layout: &Layout,
        o_weight: &CudaStorage,
        o_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.on_cuda([(x, x_layout), (argument, argument_layout), (o_weight, o_layout)])
    }

    fn bwd(
        &self,
        x: &Tensor,
        argument: &Tensor,
        o_weight: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let dy = dy.contiguous()?;
        if x.device().is_cuda() {
            let [dx, dargument, do_weight] = self.bwd_on_cuda([x, argument, o_weight], &dy)?;
            return Ok((dx, dargument, do_weight));
        }
        let want_dx = x.track_op();
        let grads = with_element!(OP, x.dtype(), T => {
            with_elements::<T, _>(OP, x, |x| with_elements::<T, _>(OP, &dy, |dy| {
                self.backward::<T>(x, o_weight, dy, want_dx)
            }))?
        });
        let dx = match grads.x {
            Some(dx) => Some(tensor(OP, dx, x.shape(), x.dtype())?),
            None => None,
        };
        Ok((dx, self.bundle.leave(argument, grads.weights)?, grads.o))
    }
}
