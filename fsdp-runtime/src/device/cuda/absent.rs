//! Without the feature `cuda` candle has no CUDA device.

use candle_core::{CudaDevice, CudaStorage};

use crate::comm::DeviceMesh;
use crate::device::Slice;
use crate::error::{Error, Result};

pub(crate) fn on(_: &DeviceMesh, _: &CudaDevice) -> Result<DeviceMesh> {
    Err(Error::Config("a CUDA device needs the feature `cuda` of `fsdp`".into()))
}

/// # Safety
/// It does nothing.
pub(crate) unsafe fn accumulate(_: &CudaStorage, _: usize, _: &Slice, _: bool) -> candle_core::Result<()> {
    Err(candle_core::Error::NotCompiledWithCudaSupport)
}
