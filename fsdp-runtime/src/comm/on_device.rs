//! Chooses backend and communicator of a mesh for a candle device.

use super::DeviceMesh;
use crate::error::{Error, Result};

#[cfg(feature = "cuda")]
use std::sync::{Arc, OnceLock};

#[cfg(feature = "cuda")]
use super::{Communicator, Phase, Tag};
#[cfg(feature = "cuda")]
use crate::device::cuda::{CudaBackend, CudaOptions};

impl DeviceMesh {
    /// The same ranks, which compute on `device`: models that are sharded over the mesh have their tensors there, and its
    /// collectives move the data there.
    ///
    /// On [`Device::Cpu`](candle_core::Device::Cpu) it is the mesh as it is. On CUDA devices (feature `cuda`) the ranks
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
    pub fn on(&self, device: &candle_core::Device) -> Result<DeviceMesh> {
        match device {
            candle_core::Device::Cpu => Ok(self.clone()),
            #[cfg(feature = "cuda")]
            candle_core::Device::Cuda(device) => {
                let backend = Arc::new(CudaBackend::new(device, &CudaOptions::default())?);
                let communicator = communicator_for(self.communicator(), &backend)?;
                Ok(self.on_backend(backend, communicator)?)
            }
            #[cfg(not(feature = "cuda"))]
            candle_core::Device::Cuda(_) => {
                Err(unsupported("a CUDA device needs the feature `cuda` of `fsdp`"))
            }
            candle_core::Device::Metal(_) => {
                Err(unsupported("models are sharded on the CPU or on CUDA devices"))
            }
        }
    }
}

fn unsupported(message: &str) -> Error {
    Error::Config(message.into())
}

/// Tells this process from all others.
#[cfg(feature = "cuda")]
fn process() -> [u8; 12] {
    use std::hash::{BuildHasher, RandomState};

    static KEY: OnceLock<u64> = OnceLock::new();
    let key = *KEY.get_or_init(|| RandomState::new().hash_one("process"));
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&key.to_ne_bytes());
    bytes[8..].copy_from_slice(&std::process::id().to_ne_bytes());
    bytes
}

#[cfg(feature = "cuda")]
fn communicator_for(control: &Arc<dyn Communicator>, backend: &CudaBackend) -> Result<Arc<dyn Communicator>> {
    let device = backend.device();
    let own = [&process()[..], &device.uuid()?[..]].concat();
    let tag = Tag { unit: "devices of the ranks".into(), phase: Phase::Setup, step: 0 };
    let all = control.host_gather(tag, own)?;
    if all.windows(2).all(|pair| pair[0] == pair[1]) && control.shares_a_process() {
        return Ok(control.clone());
    }
    let gpu = |rank: usize| all[rank].get(12..);
    let twin = |one: usize| (one + 1..all.len()).find(|&other| gpu(other) == gpu(one));
    if let Some((one, other)) = (0..all.len()).find_map(|one| Some((one, twin(one)?))) {
        let message = format!(
            "ranks {one} and {other} have the same GPU, and not all ranks have it as threads of one process: give each \
             rank its own, as by `World::local_rank`"
        );
        return Err(Error::Config(message));
    }
    by_nccl(control, device)
}

#[cfg(all(feature = "cuda", feature = "nccl"))]
fn by_nccl(
    control: &Arc<dyn Communicator>,
    device: &crate::device::cuda::CudaDevice,
) -> Result<Arc<dyn Communicator>> {
    use super::nccl::{NcclComm, NcclError, NcclOptions};

    match NcclComm::new(control.clone(), device, NcclOptions::default()) {
        Ok(communicator) => Ok(communicator),
        Err(NcclError::Library(error)) => Err(error.into()),
        Err(NcclError::Comm(error)) => Err(error.into()),
    }
}

#[cfg(all(feature = "cuda", not(feature = "nccl")))]
fn by_nccl(_: &Arc<dyn Communicator>, _: &crate::device::cuda::CudaDevice) -> Result<Arc<dyn Communicator>> {
    Err(unsupported("ranks with a GPU each need the feature `nccl` of `fsdp`"))
}
