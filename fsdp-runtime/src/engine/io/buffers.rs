//! Buffers, the tensors of a model that are kept but not trained: all ranks start with those of rank 0, and a forward that
//! is run again leaves them alone.

use std::sync::Arc;

use bytemuck::Pod;
use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Storage, Tensor};

use crate::comm::{Communicator, Phase, Tag};
use crate::engine::api::param::Param;
use crate::engine::build::module::{FsdpUnit, Fused, Tie, Visitor, Walker};
use crate::engine::ctx::Ctx;
use crate::engine::step::Step;
use crate::engine::unit::UnitCell;
use crate::error::{Error, Result};
use crate::files::StoredDtype;
use crate::spec::Attrs;

/// The buffers of `model` with their names, in declaration order.
pub(crate) fn buffer_list<M: FsdpUnit>(model: &M) -> Vec<(String, &Tensor)> {
    struct Buffers<'a>(Vec<(String, &'a Tensor)>);

    impl<'a> Visitor<'a> for Buffers<'a> {
        fn param(&mut self, _: &str, _: &Attrs, _: Option<&Tie>, _: Option<&Fused>, _: &'a Param) {}

        fn enter_unit(&mut self, _: &str, _: &'a UnitCell) {}

        fn leave_unit(&mut self) {}

        fn buffer(&mut self, name: &str, tensor: &'a Tensor) {
            self.0.push((name.into(), tensor));
        }
    }

    let mut buffers = Buffers(Vec::new());
    model.walk(&mut Walker::new(&mut buffers));
    buffers.0
}

/// What the ranks compare of their buffers before any of their bytes meet.
pub(crate) fn fingerprint<M: FsdpUnit>(model: &M) -> Vec<String> {
    let describe = |(name, tensor): (String, &Tensor)| {
        format!("buffer `{name}` {:?} {}", tensor.dims(), tensor.dtype().as_str())
    };
    buffer_list(model).into_iter().map(describe).collect()
}

/// Overwrites the buffers of every rank, in place, by those of the first. A model without buffers sends nothing.
///
/// # Errors
/// If a buffer is of a dtype that has no whole bytes or, on a device, not contiguous, naming it; those of the exchange.
pub(crate) fn broadcast<M: FsdpUnit>(model: &M, comm: &dyn Communicator) -> Result<()> {
    let buffers = buffer_list(model);
    if buffers.is_empty() || comm.size() == 1 {
        return Ok(());
    }
    let fail = |name: &str, error: candle_core::Error| Error::Usage(format!("buffer `{name}`: {error}"));
    let own = buffers.iter().map(|(name, tensor)| read(tensor).map_err(|error| fail(name, error)));
    let own: Vec<Vec<u8>> = own.collect::<Result<_>>()?;
    let tag = Tag { unit: "buffers".into(), phase: Phase::Setup, step: 0 };
    let sent = if comm.rank() == 0 { own.concat() } else { Vec::new() };
    let mut received = comm.host_gather(tag, sent)?.swap_remove(0).into_iter();
    if comm.rank() == 0 {
        return Ok(());
    }
    for ((name, tensor), own) in buffers.iter().zip(&own) {
        let bytes: Vec<u8> = received.by_ref().take(own.len()).collect();
        // What is the same already may be in use by others.
        if bytes != *own {
            overwrite_buffer(tensor, bytes).map_err(|error| fail(name, error))?;
        }
    }
    Ok(())
}

/// The dtype of a buffer, if checkpoints know it.
pub(crate) fn buffer_dtype(tensor: &Tensor) -> candle_core::Result<StoredDtype> {
    Ok(match tensor.dtype() {
        DType::U8 => StoredDtype::U8,
        DType::U32 => StoredDtype::U32,
        DType::I16 => StoredDtype::I16,
        DType::I32 => StoredDtype::I32,
        DType::I64 => StoredDtype::I64,
        DType::BF16 => StoredDtype::BF16,
        DType::F16 => StoredDtype::F16,
        DType::F32 => StoredDtype::F32,
        DType::F64 => StoredDtype::F64,
        other => candle_core::bail!("its dtype {other:?} cannot be saved"),
    })
}

/// Dtype and elements of a buffer, in row-major order.
pub(crate) fn read_buffer(tensor: &Tensor) -> candle_core::Result<(StoredDtype, Vec<u8>)> {
    Ok((buffer_dtype(tensor)?, read(tensor)?))
}

/// Gives a buffer these elements, in row-major order, in place.
pub(crate) fn overwrite_buffer(tensor: &Tensor, bytes: Vec<u8>) -> candle_core::Result<()> {
    if tensor.device().is_cpu() {
        return tensor.inplace_op1(&Overwrite(bytes));
    }
    let values = Tensor::zeros(tensor.dims(), tensor.dtype(), &Device::Cpu)?;
    values.inplace_op1(&Overwrite(bytes))?;
    assign(tensor, &values.to_device(tensor.device())?)
}

/// Gives a buffer on a device the values of another tensor there.
fn assign(tensor: &Tensor, values: &Tensor) -> candle_core::Result<()> {
    match tensor.rank() {
        0 => tensor.reshape(1)?.slice_set(&values.reshape(1)?, 0, 0),
        _ => tensor.slice_set(values, 0, 0),
    }
}

/// What the buffers of a model have held at some time.
#[derive(Clone, Default)]
pub(crate) struct BufferValues(Vec<(Tensor, Arc<Values>)>);

enum Values {
    Host(Vec<u8>),
    Device(Tensor),
}

impl BufferValues {
    /// What they hold now; what has not changed since `earlier` is shared with it. On a device, where the host would have
    /// to wait for an answer, nothing is.
    ///
    /// # Errors
    /// If a buffer is of a dtype that has no whole bytes, and those of candle.
    fn of(buffers: &[Tensor], earlier: &BufferValues) -> candle_core::Result<Self> {
        let values = |(index, tensor): (usize, &Tensor)| {
            if let Some((_, known)) = earlier.0.get(index)
                && !differs(tensor, known)?
            {
                return Ok((tensor.clone(), known.clone()));
            }
            let on_host = tensor.device().is_cpu();
            let values = if on_host { Values::Host(read(tensor)?) } else { Values::Device(tensor.copy()?) };
            Ok((tensor.clone(), Arc::new(values)))
        };
        Ok(BufferValues(buffers.iter().enumerate().map(values).collect::<candle_core::Result<_>>()?))
    }

    fn is_on_host(&self) -> bool {
        self.0.iter().all(|(_, values)| matches!(**values, Values::Host(_)))
    }

    /// Gives them back, in place, to the buffers that hold something else.
    ///
    /// # Errors
    /// Those of candle.
    pub(crate) fn restore(&self) -> candle_core::Result<()> {
        for (tensor, values) in &self.0 {
            // What is the same already may be in use by others.
            if differs(tensor, values)? {
                match &**values {
                    Values::Host(bytes) => overwrite_buffer(tensor, bytes.clone())?,
                    Values::Device(values) => assign(tensor, values)?,
                }
            }
        }
        Ok(())
    }
}

fn differs(tensor: &Tensor, values: &Values) -> candle_core::Result<bool> {
    match values {
        Values::Host(bytes) => Ok(!holds(tensor, bytes)?),
        Values::Device(_) => Ok(true),
    }
}

/// What all buffers of the model hold now: a forward that is run again must find them so, wherever in the model they are.
///
/// # Errors
/// As for [`read_buffer`].
pub(crate) fn buffer_values(ctx: &Ctx, step: &mut Step) -> candle_core::Result<BufferValues> {
    let values = BufferValues::of(&ctx.buffers, &step.seen_buffers)?;
    // Copies on a device are shared with nothing. They go with their forward, so that one which is captured as a graph
    // frees what it has allocated and nothing from before.
    step.seen_buffers = if values.is_on_host() { values.clone() } else { BufferValues::default() };
    Ok(values)
}

/// `$body` with `$values` as the elements of a [`CpuStorage`].
macro_rules! with_values {
    ($storage:expr, $values:ident => $body:expr) => {
        match $storage {
            CpuStorage::U8($values) => $body,
            CpuStorage::U32($values) => $body,
            CpuStorage::I16($values) => $body,
            CpuStorage::I32($values) => $body,
            CpuStorage::I64($values) => $body,
            CpuStorage::BF16($values) => $body,
            CpuStorage::F16($values) => $body,
            CpuStorage::F32($values) => $body,
            CpuStorage::F64($values) => $body,
            _ => candle_core::bail!("its dtype cannot be sent to other ranks"),
        }
    };
}

/// Where the elements are in the storage, in row-major order.
fn indices(layout: &Layout) -> Vec<usize> {
    let dims = layout.dims().iter().zip(layout.stride());
    dims.fold(vec![layout.start_offset()], |starts, (&size, &stride)| {
        starts.into_iter().flat_map(|start| (0..size).map(move |index| start + index * stride)).collect()
    })
}

/// Whether a tensor of the host has these elements, as [`read`] gives them.
fn holds(tensor: &Tensor, bytes: &[u8]) -> candle_core::Result<bool> {
    fn are<T: Pod>(values: &[T], range: (usize, usize), bytes: &[u8]) -> bool {
        bytemuck::cast_slice::<T, u8>(&values[range.0..range.1]) == bytes
    }
    let (storage, layout) = tensor.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(storage), Some(range)) => {
            Ok(with_values!(storage, values => are(values, range, bytes)))
        }
        _ => {
            drop(storage);
            Ok(read(tensor)? == bytes)
        }
    }
}

/// The elements in row-major order, whatever the strides.
fn read(tensor: &Tensor) -> candle_core::Result<Vec<u8>> {
    fn gather<T: Pod>(values: &[T], layout: &Layout) -> Vec<u8> {
        if let Some((start, end)) = layout.contiguous_offsets() {
            return bytemuck::cast_slice(&values[start..end]).to_vec();
        }
        let elements: Vec<T> = indices(layout).into_iter().map(|index| values[index]).collect();
        bytemuck::cast_slice(&elements).to_vec()
    }
    let tensor = tensor.to_device(&Device::Cpu)?;
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        candle_core::bail!("it is not on the CPU");
    };
    Ok(with_values!(storage, values => gather(values, layout)))
}

/// Writes these elements, in row-major order.
struct Overwrite(Vec<u8>);

impl InplaceOp1 for Overwrite {
    fn name(&self) -> &'static str {
        "fsdp-broadcast-buffer"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        fn scatter<T: Pod>(values: &mut [T], layout: &Layout, bytes: &[u8]) {
            if let Some((start, end)) = layout.contiguous_offsets() {
                return bytemuck::cast_slice_mut(&mut values[start..end]).copy_from_slice(bytes);
            }
            let elements = bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned);
            indices(layout).into_iter().zip(elements).for_each(|(index, element)| values[index] = element);
        }
        with_values!(storage, values => scatter(values, layout, &self.0));
        Ok(())
    }
}
