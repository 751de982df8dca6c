//! The devices of [`fsdp_comm`], with candle's tensors on them.
//!
//! A [`Backend`] knows streams and flat memory. What candle has of the same device is [`Attached`] to it: candle's device, and
//! the kernels for what the CPU does by code of the host.

pub mod cuda;
mod on_device;

use std::fmt;
use std::sync::Arc;

pub use fsdp_comm::device::*;

use candle_core::Device;

use crate::optim::Kernels;

pub use on_device::OnDevice;

/// What candle has of a device: what [`Backend::attached`] is for backends of candle's devices but the CPU.
pub struct Attached {
    /// candle's device. Its ops run on [`Backend::compute`].
    pub device: Device,
    /// What it does by kernels of its own.
    pub kernels: Option<Arc<dyn Kernels>>,
}

impl fmt::Debug for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attached").field("device", &self.device).finish_non_exhaustive()
    }
}

/// candle's side of a backend.
pub trait TensorDevice {
    /// candle's device of it.
    fn tensors(&self) -> &Device;

    /// What it does by kernels of its own, where the CPU runs code of the host on its memory.
    fn kernels(&self) -> Option<&dyn Kernels>;
}

impl TensorDevice for dyn Backend {
    fn tensors(&self) -> &Device {
        attached(self).map_or(&Device::Cpu, |attached| &attached.device)
    }

    fn kernels(&self) -> Option<&dyn Kernels> {
        attached(self)?.kernels.as_deref()
    }
}

fn attached(backend: &dyn Backend) -> Option<&Attached> {
    backend.attached()?.downcast_ref()
}
