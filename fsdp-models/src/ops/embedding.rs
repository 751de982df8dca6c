//! Embedding: looks up rows of a table.

use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Tensor, WithDType, bail};
use fsdp::{Accumulate, GradSink};

use super::cuda::ids_beside;
use super::cuda::table::{CudaBackward, CudaForward};
use super::element::{Element, with_element};
use super::storage::{check_ids_device, dtype, elements, ids as read_ids, with_elements};
use super::weight_grad::deliver;

pub(super) const OP: &str = "embedding";

/// The rows `ids` (u32, any shape, on the CPU or on the weight's device) of `weight` `[vocab, dim]`: the result is
/// `[ids' shape.., dim]`.
///
/// # Errors
/// If an id is not below `vocab` (the first such id and its position are named), if `ids` is not u32, if
/// `weight` is not a matrix of f32, bf16 or f16, or if the tensors are not all on the CPU or on one CUDA
/// device.
pub fn embedding(ids: &Tensor, weight: &Tensor, sink: &GradSink) -> Result<Tensor> {
    check_ids_device(OP, "ids", ids, ("the weight", weight))?;
    let [vocab, dim] = *weight.dims() else {
        bail!("{OP}: expected a weight of [vocab, dim], got {:?}", weight.dims());
    };
    let mut dims = ids.dims().to_vec();
    dims.push(dim);
    let on_device = ids_beside(OP, ids, weight)?;
    let ids = read_ids(OP, ids)?.unwrap_or_default();
    check_ids(OP, "id", &ids, vocab)?;
    let op = Embedding { ids, on_device, dims, sink: sink.clone() };
    let weight = weight.contiguous()?;
    if weight.track_op() { weight.apply_op1(op) } else { weight.apply_op1_no_bwd(&op) }
}

/// Fails at the first of `ids` that is not below `vocab`.
pub(super) fn check_ids(op: &str, what: &str, ids: &[u32], vocab: usize) -> Result<()> {
    match ids.iter().position(|&id| id as usize >= vocab) {
        Some(at) => {
            bail!("{op}: {what} {} at position {at} is out of range for a vocabulary of {vocab}", ids[at])
        }
        None => Ok(()),
    }
}

pub(super) struct Embedding {
    /// None if they are captured in a graph.
    pub ids: Vec<u32>,
    /// The same on the weight's device, if that is a CUDA device.
    #[allow(dead_code, reason = "read with the feature `cuda`")]
    pub on_device: Option<Tensor>,
    pub dims: Vec<usize>,
    pub sink: GradSink,
}

impl CustomOp1 for Embedding {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, weight: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (_, dim) = layout.shape().dims2()?;
        let rows = with_element!(OP, dtype(weight), T => {
            let weight: &[T] = elements(OP, weight, layout)?;
            let mut rows = Vec::with_capacity(self.ids.len() * dim);
            for &id in &self.ids {
                rows.extend_from_slice(&weight[id as usize * dim..][..dim]);
            }
            T::to_cpu_storage_owned(rows)
        });
        Ok((rows, Shape::from(self.dims.as_slice())))
    }

    fn cuda_fwd(&self, weight: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        self.on_cuda([(weight, layout)])
    }

    fn bwd(&self, weight: &Tensor, _rows: &Tensor, drows: &Tensor) -> Result<Option<Tensor>> {
        let drows = drows.contiguous()?;
        if weight.device().is_cuda() {
            let [dweight] = self.bwd_on_cuda([weight], &drows)?;
            return Ok(dweight);
        }
        let (_, dim) = weight.dims2()?;
        with_element!(OP, drows.dtype(), T => with_elements::<T, _>(OP, &drows, |drows| {
            let drows = T::widen(drows);
            deliver(OP, weight, &self.sink, |dst, mode| {
                if mode == Accumulate::Overwrite {
                    dst.fill(0.0);
                }
                for (position, &id) in self.ids.iter().enumerate() {
                    let row = &mut dst[id as usize * dim..][..dim];
                    row.iter_mut().zip(&drows[position * dim..]).for_each(|(d, g)| *d += g);
                }
                Ok(())
            })
        }))
    }
}
