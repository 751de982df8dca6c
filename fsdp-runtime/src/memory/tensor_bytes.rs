//! The bytes of candle's tensors, in row-major order: read, compared, and overwritten in place.

use bytemuck::Pod;
use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Result, Storage, Tensor, bail};

use crate::files::StoredDtype;

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
            _ => bail!("its dtype cannot be sent to other ranks"),
        }
    };
}

/// The dtype of a tensor, if checkpoints know it.
pub(crate) fn stored_dtype(tensor: &Tensor) -> Result<StoredDtype> {
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
        other => bail!("its dtype {other:?} cannot be saved"),
    })
}

/// The elements, whatever the device and the strides.
///
/// # Errors
/// If its dtype has no whole bytes, and those of candle.
pub(crate) fn read(tensor: &Tensor) -> Result<Vec<u8>> {
    with_bytes(tensor, <[u8]>::to_vec)
}

/// Whether the tensor has these elements.
pub(crate) fn holds(tensor: &Tensor, bytes: &[u8]) -> Result<bool> {
    with_bytes(tensor, |own| own == bytes)
}

fn with_bytes<T>(tensor: &Tensor, with: impl FnOnce(&[u8]) -> T) -> Result<T> {
    let tensor = tensor.to_device(&Device::Cpu)?.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
        bail!("it is not on the CPU");
    };
    Ok(with_values!(storage, values => with(bytemuck::cast_slice(&values[start..end]))))
}

/// Gives a tensor these elements, in place. On a device it must be contiguous.
pub(crate) fn overwrite(tensor: &Tensor, bytes: Vec<u8>) -> Result<()> {
    if tensor.device().is_cpu() {
        return tensor.inplace_op1(&Overwrite(bytes));
    }
    let values = Tensor::zeros(tensor.dims(), tensor.dtype(), &Device::Cpu)?;
    values.inplace_op1(&Overwrite(bytes))?;
    assign(tensor, &values.to_device(tensor.device())?)
}

/// Gives a tensor on a device the values of another one there, in place.
pub(crate) fn assign(tensor: &Tensor, values: &Tensor) -> Result<()> {
    match tensor.rank() {
        0 => tensor.reshape(1)?.slice_set(&values.reshape(1)?, 0, 0),
        _ => tensor.slice_set(values, 0, 0),
    }
}

/// Writes these elements.
struct Overwrite(Vec<u8>);

impl InplaceOp1 for Overwrite {
    fn name(&self) -> &'static str {
        "fsdp-overwrite"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
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

/// Where the elements are in the storage.
fn indices(layout: &Layout) -> Vec<usize> {
    let dims = layout.dims().iter().zip(layout.stride());
    dims.fold(vec![layout.start_offset()], |starts, (&size, &stride)| {
        starts.into_iter().flat_map(|start| (0..size).map(move |index| start + index * stride)).collect()
    })
}
