//! Typed views of candle's CPU storage, and checks of the ops' arguments.

use super::cuda::{self, is_captured, same_stream};
use candle_core::{
    CpuStorage, DType, Device, DeviceLocation, Layout, Result, Storage, Tensor, WithDType, bail,
};

/// The elements of a contiguous CPU tensor.
pub(super) fn elements<'a, T: WithDType>(
    op: &str,
    storage: &'a CpuStorage,
    layout: &Layout,
) -> Result<&'a [T]> {
    let values = T::cpu_storage_as_slice(storage)?;
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!("{op}: expected a contiguous tensor, got {layout:?}");
    };
    match values.get(start..end) {
        Some(values) => Ok(values),
        None => bail!("{op}: a layout of elements {start}..{end} over a storage of {}", values.len()),
    }
}

/// The CPU storage of a tensor.
pub(super) fn cpu<'a>(op: &str, storage: &'a Storage) -> Result<&'a CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        _ => bail!("{op}: expected tensors on the CPU"),
    }
}

/// The dtype in which `storage` really holds its elements, which for a resharded parameter is none that can
/// be computed with.
pub(super) fn dtype(storage: &CpuStorage) -> DType {
    candle_core::backend::BackendStorage::dtype(storage)
}

/// Runs `f` on the elements of a contiguous CPU tensor.
pub(super) fn with_elements<T: WithDType, R>(
    op: &str,
    tensor: &Tensor,
    f: impl FnOnce(&[T]) -> Result<R>,
) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    f(elements(op, cpu(op, &storage)?, layout)?)
}

/// The elements of an id tensor, in order. From a device they are copied, which waits for its stream; `None` while what is
/// done there is captured as a graph, in which nothing comes back to the host.
pub(super) fn ids(op: &str, ids: &Tensor) -> Result<Option<Vec<u32>>> {
    if ids.dtype() != DType::U32 {
        bail!("{op}: expected ids of dtype u32, got {}", ids.dtype().as_str());
    }
    if is_captured(ids.device()) {
        return Ok(None);
    }
    let ids = ids.to_device(&Device::Cpu)?.contiguous()?;
    with_elements::<u32, _>(op, &ids, |ids| Ok(Some(ids.to_vec())))
}

/// Fails unless all tensors are on one device that ops compute on.
pub(super) fn check_devices(op: &str, first: (&str, &Tensor), others: &[(&str, &Tensor)]) -> Result<()> {
    let device = first.1.device();
    let place = |device: &Device| match device.location() {
        DeviceLocation::Cpu => "the CPU".to_owned(),
        DeviceLocation::Cuda { gpu_id } => format!("CUDA device {gpu_id}"),
        DeviceLocation::Metal { gpu_id } => format!("Metal device {gpu_id}"),
    };
    let supported = device.is_cpu() || (cuda::BUILT && device.is_cuda());
    if !supported {
        let feature = if device.is_cuda() { " (which needs the feature `cuda`)" } else { "" };
        bail!(
            "{op}: {} is on {}: expected tensors on the CPU or a CUDA device{feature}",
            first.0,
            place(device)
        );
    }
    for (name, tensor) in others {
        let other = tensor.device();
        if other.location() != device.location() {
            bail!("{op}: {} is on {}, but {name} is on {}", first.0, place(device), place(other));
        }
        if !same_stream(device, other) {
            bail!(
                "{op}: {} and {name} are on {}, but of two candle devices with a stream each: expected one",
                first.0,
                place(device)
            );
        }
    }
    Ok(())
}

/// Fails unless ids are on the CPU or beside the tensor that they go with.
pub(super) fn check_ids_device(op: &str, name: &str, ids: &Tensor, beside: (&str, &Tensor)) -> Result<()> {
    if ids.device().is_cpu() {
        check_devices(op, beside, &[])
    } else {
        check_devices(op, beside, &[(name, ids)])
    }
}

/// Fails unless both tensors have the same dtype, one that ops compute with.
pub(super) fn check_dtypes(op: &str, first: (&str, &Tensor), second: (&str, &Tensor)) -> Result<()> {
    let (a, b) = (first.1.dtype(), second.1.dtype());
    if a != b {
        bail!("{op}: {} is {}, but {} is {}", first.0, a.as_str(), second.0, b.as_str());
    }
    if !matches!(a, DType::F32 | DType::BF16 | DType::F16) {
        bail!("{op}: expected f32, bf16 or f16, got {}", a.as_str());
    }
    Ok(())
}

/// The product of all dims but the last, and the last.
pub(super) fn rows_and_width(op: &str, tensor: &Tensor) -> Result<(usize, usize)> {
    match tensor.dims() {
        [rows @ .., width] => Ok((rows.iter().product(), *width)),
        [] => bail!("{op}: expected at least one dim, got a scalar"),
    }
}
