//! Aliases on a CUDA device: cudarc's slices over memory that they do not own.

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::{CudaDevice, CudaStorage};

use crate::device::Slice;
use crate::spec::Dtype;

/// A byte of its own: the driver is not asked for empty memory, of which it may refuse to free any.
pub(in crate::memory::alias) fn tombstone(device: &CudaDevice) -> candle_core::Result<CudaStorage> {
    let slice = CudaStorageSlice::F4(device.alloc_zeros::<u8>(1)?);
    Ok(CudaStorage { slice, device: device.clone() })
}

pub(in crate::memory::alias) fn alias(device: &CudaDevice, slice: &Slice) -> CudaStorage {
    let stream = device.cuda_stream();
    let (address, len) = (slice.as_ptr().addr() as u64, slice.len());
    // SAFETY: address and length are those of a live part of the buffer, whose elements are initialised and of this dtype.
    // The slices go straight into a storage from which `Aliases::take_back` takes them, to leak them: the driver is not
    // asked to free them.
    let slice = unsafe {
        match slice.dtype() {
            Dtype::F32 => CudaStorageSlice::F32(stream.upgrade_device_ptr(address, len)),
            Dtype::BF16 => CudaStorageSlice::BF16(stream.upgrade_device_ptr(address, len)),
            Dtype::F16 => CudaStorageSlice::F16(stream.upgrade_device_ptr(address, len)),
        }
    };
    CudaStorage { slice, device: device.clone() }
}

/// Whether it is the alias that was made.
pub(in crate::memory::alias) fn forget(storage: CudaStorage, slice: &Slice) -> bool {
    fn leak<T>(alias: CudaSlice<T>, address: u64, len: usize) -> bool {
        let stream = alias.stream().clone();
        let same = alias.device_ptr(&stream).0 == address;
        let whole = alias.len() == len;
        if same {
            alias.leak();
        }
        same && whole
    }
    let (address, len) = (slice.as_ptr().addr() as u64, slice.len());
    match storage.slice {
        CudaStorageSlice::F32(alias) => leak(alias, address, len),
        CudaStorageSlice::BF16(alias) => leak(alias, address, len),
        CudaStorageSlice::F16(alias) => leak(alias, address, len),
        other => {
            drop(other);
            false
        }
    }
}
