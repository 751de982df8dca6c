//! Aliases on the CPU: `Vec`s over memory that they do not own.

use candle_core::CpuStorage;
use half::{bf16, f16};

use crate::device::{Element, Slice};
use crate::spec::Dtype;

pub(super) fn tombstone() -> CpuStorage {
    CpuStorage::F4(Vec::new())
}

pub(super) fn alias(slice: &Slice) -> CpuStorage {
    match slice.dtype() {
        Dtype::F32 => CpuStorage::F32(alias_vec::<f32>(slice)),
        Dtype::BF16 => CpuStorage::BF16(alias_vec::<bf16>(slice)),
        Dtype::F16 => CpuStorage::F16(alias_vec::<f16>(slice)),
    }
}

fn alias_vec<T: Element>(slice: &Slice) -> Vec<T> {
    // SAFETY: pointer, length and alignment are those of a live part of the buffer, whose elements are
    // initialised. The allocator never sees this pointer: the `Vec` goes straight into a storage from which
    // only `Aliases::drop` takes it, to forget it, and candle neither grows nor frees a storage that is
    // reachable from a live tensor.
    unsafe { Vec::from_raw_parts(slice.as_ptr().cast::<T>(), slice.len(), slice.len()) }
}

pub(super) fn forget(storage: CpuStorage, slice: &Slice) {
    let address = slice.as_ptr();
    match storage {
        CpuStorage::F32(vec) if vec.as_ptr().cast() == address.cast_const() => std::mem::forget(vec),
        CpuStorage::BF16(vec) if vec.as_ptr().cast() == address.cast_const() => std::mem::forget(vec),
        CpuStorage::F16(vec) if vec.as_ptr().cast() == address.cast_const() => std::mem::forget(vec),
        other => drop(other),
    }
}
