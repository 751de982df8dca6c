//! Passes a weight's gradient on: into an open sink, or back to candle.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Tensor,
    WithDType, bail,
};
use fsdp::{Accumulate, GradSink};

use super::cuda::table::CudaForward;
use super::element::{Element, with_element};

/// A tensor of dtype `dtype` made of f32 values.
pub(super) fn tensor(op: &str, values: Vec<f32>, shape: &Shape, dtype: DType) -> Result<Tensor> {
    with_element!(op, dtype, T => {
        let storage = candle_core::Storage::Cpu(T::to_cpu_storage_owned(T::narrow(values)));
        Ok(Tensor::from_storage(storage, shape, candle_core::op::BackpropOp::none(), false))
    })
}

/// Delivers a weight's gradient, which `compute` writes into f32 memory of the weight's size, or adds to it.
///
/// Returns what the op's `bwd` must return for the weight: `None` if the sink took the gradient or no one
/// wants it. Only a leaf's gradient may go to a sink: candle panics if a node inside its graph gets none.
pub(super) fn deliver(
    op: &str,
    weight: &Tensor,
    sink: &GradSink,
    compute: impl Fn(&mut [f32], Accumulate) -> Result<()>,
) -> Result<Option<Tensor>> {
    let numel = weight.elem_count();
    let leaf = weight.is_variable() || !weight.track_op();
    if leaf
        && sink.accumulate_f32(|dst, mode| {
            if dst.len() != numel {
                bail!(
                    "{op}: the sink of the weight {:?} holds {} elements, expected {numel}",
                    weight.dims(),
                    dst.len()
                );
            }
            compute(dst, mode)
        })?
    {
        return Ok(None);
    }
    if !weight.track_op() {
        return Ok(None);
    }
    let mut grad = vec![0.0; numel];
    compute(&mut grad, Accumulate::Overwrite)?;
    tensor(op, grad, weight.shape(), weight.dtype()).map(Some)
}

/// Copies or adds a gradient that is already computed.
pub(super) fn store(dst: &mut [f32], mode: Accumulate, grad: &[f32]) {
    match mode {
        Accumulate::Overwrite => dst.copy_from_slice(grad),
        Accumulate::Add => dst.iter_mut().zip(grad).for_each(|(d, g)| *d += g),
    }
}

type Slots = Arc<Mutex<Vec<Option<Tensor>>>>;

/// Up to three weights tied to one argument of an op, because candle tracks at most three.
///
/// The argument is a node of one element that depends on the weights. The op that takes it leaves the
/// weights' gradients with [`Bundle::leave`] in its `bwd` and returns what that gives as the argument's
/// gradient; candle visits the node after the op, and the node's own `bwd` hands the gradients on. So no
/// gradient is lost: what a sink did not take goes to candle.
pub(super) struct Bundle {
    slots: Slots,
}

pub(super) struct Node {
    slots: Slots,
    len: usize,
}

impl Bundle {
    /// The bundle and the argument that stands for `weights`, which is tracked if one of them is.
    pub fn new(weights: &[&Tensor]) -> Result<(Bundle, Tensor)> {
        let slots = Slots::default();
        let node = Node { slots: slots.clone(), len: weights.len() };
        let argument = match *weights {
            [a] => a.apply_op1(node),
            [a, b] => a.apply_op2(b, node),
            [a, b, c] => a.apply_op3(b, c, node),
            _ => bail!("a bundle of {} weights", weights.len()),
        }?;
        Ok((Bundle { slots }, argument))
    }

    /// Leaves the weights' gradients, in their order, for the bundle's node; returns the gradient of the
    /// argument.
    pub fn leave(&self, argument: &Tensor, grads: Vec<Option<Tensor>>) -> Result<Option<Tensor>> {
        *self.slots.lock().unwrap_or_else(PoisonError::into_inner) = grads;
        if argument.track_op() { argument.zeros_like().map(Some) } else { Ok(None) }
    }
}

impl Node {
    fn forward(&self) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(1)))
    }

    fn take(&self) -> Result<Vec<Option<Tensor>>> {
        let grads = std::mem::take(&mut *self.slots.lock().unwrap_or_else(PoisonError::into_inner));
        if grads.len() != self.len {
            bail!("a bundle of {} weights was left {} gradients", self.len, grads.len());
        }
        Ok(grads)
    }
}

impl CustomOp1 for Node {
    fn name(&self) -> &'static str {
        "weight-bundle"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.forward()
    }

    fn cuda_fwd(&self, weight: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        self.on_cuda([(weight, layout)])
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(self.take()?.swap_remove(0))
    }
}

impl CustomOp2 for Node {
    fn name(&self) -> &'static str {
        "weight-bundle"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.forward()
    }

    fn cuda_fwd(
        &self,
        a: &CudaStorage,
        a_layout: &Layout,
        b: &CudaStorage,
        b_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.on_cuda([(a, a_layout), (b, b_layout)])
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let mut grads = self.take()?;
        Ok((grads[0].take(), grads[1].take()))
    }
}

impl CustomOp3 for Node {
    fn name(&self) -> &'static str {
        "weight-bundle"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward()
    }

    fn cuda_fwd(
        &self,
        a: &CudaStorage,
        a_layout: &Layout,
        b: &CudaStorage,
        b_layout: &Layout,
        c: &CudaStorage,
        c_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.on_cuda([(a, a_layout), (b, b_layout), (c, c_layout)])
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let mut grads = self.take()?;
        Ok((grads[0].take(), grads[1].take(), grads[2].take()))
    }
}
