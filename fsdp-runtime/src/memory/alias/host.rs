//! Parameters in host memory: a piece of a buffer is a `Vec`, and is lent as one.

use candle_core::CpuStorage;
use half::{bf16, f16};

use crate::device::{Element, Slice};
use crate::spec::Dtype;

pub(super) fn tombstone() -> CpuStorage {
    CpuStorage::F4(Vec::new())
}

/// # Panics
/// If `slice` is no piece of its buffer, or is lent already.
pub(super) fn lend(slice: &Slice) -> CpuStorage {
    fn vec<T: Element>(slice: &Slice) -> Vec<T> {
        // SAFETY: the unit has just been acquired from the gather pipeline: on the compute stream, which is this thread,
        // its gather is over, its peers have read what they needed, and nothing else uses it before it is released.
        let lent = unsafe { slice.lend::<T>() };
        lent.expect("a parameter is a piece of its bucket's memory, and has one tensor")
    }
    match slice.dtype() {
        Dtype::F32 => CpuStorage::F32(vec(slice)),
        Dtype::BF16 => CpuStorage::BF16(vec(slice)),
        Dtype::F16 => CpuStorage::F16(vec(slice)),
    }
}

/// Whether it is what was lent.
pub(super) fn take_back(storage: CpuStorage, slice: &Slice) -> bool {
    match (slice.dtype(), storage) {
        (Dtype::F32, CpuStorage::F32(vec)) => slice.take_back(Some(vec)),
        (Dtype::BF16, CpuStorage::BF16(vec)) => slice.take_back(Some(vec)),
        (Dtype::F16, CpuStorage::F16(vec)) => slice.take_back(Some(vec)),
        (Dtype::F32, _) => slice.take_back::<f32>(None),
        (Dtype::BF16, _) => slice.take_back::<bf16>(None),
        (Dtype::F16, _) => slice.take_back::<f16>(None),
    }
}
