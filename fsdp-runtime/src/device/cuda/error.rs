//! Errors of CUDA.

use cudarc::driver::{DriverError, sys};
use cudarc::nvrtc::CompileError;

use crate::comm::CommError;

/// A device cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// A library is not installed, or not where the loader looks.
    #[error("{library} is not there: {install}")]
    MissingLibrary {
        /// `the CUDA driver (libcuda.so.1)`, for instance.
        library: &'static str,
        /// What to install.
        install: &'static str,
    },
    /// There is no such device.
    #[error("there is no device cuda:{ordinal}: {count} are visible (CUDA_VISIBLE_DEVICES chooses them)")]
    NoDevice {
        /// The one that was asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// candle's device has no stream of its own.
    #[error(
        "cuda:{ordinal} works on a default stream, which is another one in every thread: make the device with \
         `fsdp::cuda::device({ordinal})`, or candle's `Device::new_cuda_with_stream`"
    )]
    DefaultStream {
        /// The device.
        ordinal: usize,
    },
    /// The driver or NVRTC failed.
    #[error("cuda:{ordinal}: {call}: {message}")]
    Call {
        /// The device.
        ordinal: usize,
        /// What was tried.
        call: &'static str,
        /// The driver's words.
        message: String,
    },
}

impl CudaError {
    pub(super) fn of_nvrtc(ordinal: usize, error: &CompileError) -> CudaError {
        let message = match error {
            CompileError::CompileError { log, .. } => log.to_string_lossy().into_owned(),
            other => other.to_string(),
        };
        CudaError::Call { ordinal, call: "compiling the kernels", message }
    }
}

/// The driver's words for an error.
pub(super) fn words(error: DriverError) -> String {
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
