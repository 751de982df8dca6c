//! CUDA devices (feature `cuda-driver`): streams of the driver, events without timing, stream-ordered memory.
//!
//! Everything here goes through the driver and NVRTC, which are loaded when the first device is opened: a program built
//! with it runs where there is no GPU, and `CudaDevice::open` says what is missing. Without the feature there is the error
//! only, which nothing makes.
//!
//! # What orders what
//! cudarc's event tracking is off: it keeps one read event a buffer, so that with two streams that read, the writer waits
//! for the later one only. All order comes from events that the runtime records itself:
//! - Work on one stream runs in the order of submission. Between streams, whoever submits work makes its stream wait
//!   ([`Stream::wait`](super::Stream::wait)) for the event of what it depends on.
//! - Memory is allocated and freed in the order of the compute stream. What another stream does with a buffer is noted
//!   with it, as an event; the free waits for all of them, so that memory is used again only after its last reader.
//!
//! # Failure
//! A device fails as a whole: after an error of the driver, of work on the host, or of a collective that was aborted,
//! every stream refuses more work with that error, and events that were recorded later carry it. A host thread that waits
//! for an event polls, so that it learns of a failure that the device does not know of.

#[cfg(feature = "cuda-driver")]
mod driver;
mod error;
#[cfg(not(feature = "cuda-driver"))]
mod range;

#[cfg(feature = "cuda-driver")]
pub use driver::*;
pub use error::CudaError;
#[cfg(not(feature = "cuda-driver"))]
pub(crate) use range::HostRange;
