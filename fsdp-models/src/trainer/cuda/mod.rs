//! The CUDA devices of this machine.

#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
mod present;

#[cfg(not(feature = "cuda"))]
pub(super) use absent::{device, devices};
#[cfg(feature = "cuda")]
pub(super) use present::{device, devices};
