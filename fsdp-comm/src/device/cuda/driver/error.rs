//! The driver's errors, in words.

use cudarc::driver::{DriverError, sys};
use cudarc::nvrtc::CompileError;

use crate::device::cuda::CudaError;
use crate::error::CommError;

/// Why NVRTC has not compiled the kernels for a device.
pub(super) fn of_nvrtc(ordinal: usize, error: &CompileError) -> CudaError {
    let message = match error {
        CompileError::CompileError { log, .. } => log.to_string_lossy().into_owned(),
        other => other.to_string(),
    };
    CudaError::Call { ordinal, call: "compiling the kernels", message }
}

/// The driver's words for an error.
pub fn words(error: DriverError) -> String {
    let name = error.error_name().map_or("an unknown error".into(), |name| name.to_string_lossy());
    match error.error_string() {
        Ok(text) => format!("{name} ({})", text.to_string_lossy()),
        Err(_) => name.into_owned(),
    }
}

pub(super) fn is_out_of_memory(error: DriverError) -> bool {
    error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY
}

/// A failed call in the order of a stream.
pub(super) fn on_stream(stream: &str, call: &str) -> impl Fn(DriverError) -> CommError {
    move |error| CommError::Stream { stream: stream.to_owned(), message: format!("{call}: {}", words(error)) }
}
