//! Errors of CUDA.

/// A device cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
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
