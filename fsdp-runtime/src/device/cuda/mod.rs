//! CUDA devices, with candle's tensors on them (feature `cuda`), over the streams and the memory of [`fsdp_comm`].

#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
mod backend;
#[cfg(feature = "cuda")]
mod mesh;
#[cfg(feature = "cuda")]
mod tensors;
#[cfg(feature = "cuda")]
mod updates;

pub use fsdp_comm::device::cuda::*;

#[cfg(not(feature = "cuda"))]
pub(crate) use absent::{accumulate, on};
#[cfg(feature = "cuda")]
pub use backend::CudaBackend;
#[cfg(feature = "cuda")]
pub(crate) use mesh::on;
#[cfg(feature = "cuda")]
pub(crate) use tensors::accumulate;
#[cfg(feature = "cuda")]
pub use tensors::{device, launch};
#[cfg(feature = "cuda")]
pub(crate) use updates::Steps;
