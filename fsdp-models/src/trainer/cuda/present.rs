use candle_core::Device;

use crate::trainer::TrainError;

/// Their number, which is not 0.
pub(in crate::trainer) fn devices() -> crate::Result<usize> {
    match fsdp::cuda::device_count().map_err(fsdp::Error::from)? {
        0 => Err(TrainError::NoCudaDevice.into()),
        count => Ok(count),
    }
}

/// candle's device of this number, with a stream of its own.
pub(in crate::trainer) fn device(ordinal: usize) -> crate::Result<Device> {
    Ok(fsdp::cuda::device(ordinal).map_err(fsdp::Error::from)?)
}
