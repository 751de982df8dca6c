//! A mesh, and candle's device that its ranks compute on.

use candle_core::Device;

use super::TensorDevice;
use crate::comm::DeviceMesh;
use crate::error::{Error, Result};

/// A mesh whose models have their tensors on a device of candle.
pub trait OnDevice: Sized {
    /// A mesh of these ranks that computes on `device`: models that are sharded over the mesh have their tensors there, and its
    /// collectives move the data there.
    ///
    /// On [`Device::Cpu`] it is the mesh as it is. On CUDA devices (feature `cuda`) the ranks
    /// tell each other which one they have. Ranks that are threads of one process and all have the same one copy from each
    /// other; ranks with one each use NCCL (feature `nccl`). Nothing else works: NCCL refuses a device that two ranks
    /// have. To choose otherwise, make the communicator and use [`DeviceMesh::on_backend`].
    ///
    /// Every rank of the mesh must call it, for the same kind of device; the mesh and its communicator should not be used
    /// otherwise from then on.
    ///
    /// # Errors
    /// If the program is built without the feature, candle's device works on a default stream (make it with
    /// `fsdp::cuda::device`), the driver, NVRTC or NCCL is missing or fails, or ranks share some devices but not all.
    fn on(&self, device: &Device) -> Result<Self>;

    /// The device that models over the mesh are on, where their inputs belong.
    fn device(&self) -> &Device;
}

impl OnDevice for DeviceMesh {
    fn on(&self, device: &Device) -> Result<DeviceMesh> {
        match device {
            Device::Cpu => Ok(self.clone()),
            Device::Cuda(device) => super::cuda::on(self, device),
            Device::Metal(_) => Err(Error::Config("models are sharded on the CPU or on CUDA devices".into())),
        }
    }

    fn device(&self) -> &Device {
        self.backend().tensors()
    }
}
