//! Embedding on a CUDA device.

use candle_core::{CudaStorage, Layout, Result, Shape, Tensor, bail};
use fsdp::Accumulate;
use fsdp_kernels::{
    DevicePtr, Dtype, EmbeddingArgs, EmbeddingBackwardArgs, EmbeddingSpansArgs, embedding,
    embedding_backward, embedding_spans,
};

use crate::ops::cuda::present::{self as cuda, Buffer, Out, View, address, ids_at};
use crate::ops::cuda::table::{CudaBackward, CudaForward};
use crate::ops::embedding::{Embedding, OP};

impl Embedding {
    /// Address of the ids on the weight's device, and how many they are.
    fn cuda_ids(&self) -> Result<(DevicePtr, u32)> {
        let Some(ids) = &self.on_device else { bail!("{OP}: the ids are not on a CUDA device") };
        let len = ids.elem_count();
        let Ok(count) = u32::try_from(len) else { bail!("{OP}: {len} ids are too many") };
        Ok((ids_at(OP, ids, len)?, count))
    }

    /// Adds the rows' gradients to those of the table, which are f32.
    fn add_rows(&self, weight: &Tensor, drows: View<'_>, dweight: Out<'_>) -> Result<()> {
        let (vocab, dim) = table(weight.dims2()?)?;
        let (ids, count) = self.cuda_ids()?;
        let device = drows.device();
        let [first, end] = [
            device.alloc_zeros::<u32>(vocab.max(1) as usize)?,
            device.alloc_zeros::<u32>(vocab.max(1) as usize)?,
        ];
        let (first, end) = (address(device, &first), address(device, &end));
        let args = EmbeddingSpansArgs { ids, first, end, count, vocab };
        // SAFETY: the arguments of this kernel: a zero for each row of the table.
        unsafe { cuda::launch(device, embedding_spans(), &args) }?;
        let args = EmbeddingBackwardArgs {
            ids,
            first,
            end,
            drows: drows.at(),
            dweight: dweight.at(),
            dim: dim as u64,
            count,
            vocab,
        };
        // SAFETY: the arguments of this kernel: what the last one wrote, a row for each id, the table's gradient.
        unsafe { cuda::launch(device, embedding_backward(drows.dtype()), &args) }
    }
}

impl CudaForward<1> for Embedding {
    fn on_cuda(&self, [(weight, layout)]: [(&CudaStorage, &Layout); 1]) -> Result<(CudaStorage, Shape)> {
        let (vocab, dim) = table(layout.shape().dims2()?)?;
        let weight = View::new(OP, weight, layout)?;
        let (ids, count) = self.cuda_ids()?;
        let mut rows = Buffer::new(weight.device(), weight.dtype(), count as usize * dim)?;
        let args = EmbeddingArgs {
            ids,
            weight: weight.at(),
            rows: rows.out().at(),
            dim: dim as u64,
            count: count.into(),
            vocab,
        };
        // SAFETY: the arguments of this kernel: a table of that shape, a row for each id.
        unsafe { cuda::launch(weight.device(), embedding(weight.dtype()), &args) }?;
        Ok((rows.into_storage(), Shape::from(self.dims.as_slice())))
    }
}

impl CudaBackward<1> for Embedding {
    fn bwd_on_cuda(&self, [weight]: [&Tensor; 1], drows: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let drows = View::of(OP, drows)?;
        let dweight = cuda::deliver(OP, weight, &self.sink, |dst, mode| {
            if dst.dtype() == Dtype::F32 {
                if mode == Accumulate::Overwrite {
                    cuda::zero(&dst)?;
                }
                return self.add_rows(weight, drows, dst);
            }
            let mut sums = Buffer::new(dst.device(), Dtype::F32, dst.len())?;
            cuda::zero(&sums.out())?;
            self.add_rows(weight, drows, sums.out())?;
            cuda::add(dst, mode, sums.view())
        })?;
        Ok([dweight])
    }
}

/// Rows of a table, as kernels take them, and their width.
fn table((vocab, dim): (usize, usize)) -> Result<(u32, usize)> {
    match u32::try_from(vocab) {
        Ok(vocab) => Ok((vocab, dim)),
        Err(_) => bail!("{OP}: a table of {vocab} rows is too large"),
    }
}
