//! Without the feature `cuda` candle has no CUDA device, and no tensor is on one.

use candle_core::{CudaDevice, CudaStorage, Error, Result};

use crate::device::Slice;

pub(in crate::memory::alias) fn tombstone(_: &CudaDevice) -> Result<CudaStorage> {
    Err(Error::NotCompiledWithCudaSupport)
}

pub(in crate::memory::alias) fn alias(device: &CudaDevice, _: &Slice) -> CudaStorage {
    unreachable!("candle was built without CUDA, and has {device:?}")
}

pub(in crate::memory::alias) fn forget(_: CudaStorage, _: &Slice) -> bool {
    false
}
