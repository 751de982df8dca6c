//! Devices by the driver.

mod block;
mod copy;
mod device;
mod error;
mod event;
mod graph;
mod kernels;
mod libraries;
mod nvtx;
mod stream;

#[cfg(feature = "nccl")]
pub(crate) use block::GiveBack;
pub use block::{CudaMemory, PinnedMemory};
pub use device::{CudaDevice, CudaOptions, KernelImage, device_count};
pub use error::words;
pub use event::CudaEvent;
pub use graph::CudaWork;
pub use kernels::{compiled, kernel_dtype, max_blocks};
#[cfg(feature = "nccl")]
pub(crate) use libraries::has_nccl;
pub(crate) use nvtx::HostRange;
pub use stream::{CudaStream, Priority};
