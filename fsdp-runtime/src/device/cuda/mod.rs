//! CUDA devices: streams of the driver, events without timing, stream-ordered memory.
//!
//! Everything here goes through the driver and NVRTC, which are loaded when the first device is opened: a program built
//! with it runs where there is no GPU, and [`CudaDevice::open`] says what is missing.
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

#[cfg(feature = "cuda")]
mod backend;
mod block;
mod copy;
mod device;
mod error;
mod event;
#[cfg(feature = "cuda")]
mod graph;
mod kernels;
mod libraries;
mod nvtx;
mod stream;
#[cfg(feature = "cuda")]
mod tensors;
#[cfg(feature = "cuda")]
mod updates;

#[cfg(feature = "cuda")]
pub use backend::CudaBackend;
#[cfg(feature = "nccl")]
pub(crate) use block::GiveBack;
pub use block::{CudaMemory, PinnedMemory};
pub use device::{CudaDevice, CudaOptions, KernelImage};
pub use error::CudaError;
pub use event::CudaEvent;
#[cfg(feature = "cuda")]
pub(crate) use graph::CudaWork;
#[cfg(feature = "nccl")]
pub(crate) use libraries::has_nccl;
pub(crate) use nvtx::HostRange;
pub use stream::{CudaStream, Priority};
#[cfg(feature = "cuda")]
pub(crate) use tensors::accumulate;
#[cfg(feature = "cuda")]
pub use tensors::{device, device_count, launch};
#[cfg(feature = "cuda")]
pub(crate) use updates::Steps;
