//! A mesh on CUDA devices: which collectives its ranks have there.

use std::sync::{Arc, OnceLock};

use fsdp_comm::device::cuda::{CudaDevice, CudaOptions};

use super::CudaBackend;
use crate::comm::{Communicator, DeviceMesh, Phase, Tag};
use crate::error::{Error, Result};

/// The ranks of `mesh`, which compute on `device`.
pub(crate) fn on(mesh: &DeviceMesh, device: &candle_core::CudaDevice) -> Result<DeviceMesh> {
    let backend = Arc::new(CudaBackend::new(device, &CudaOptions::default())?);
    let communicator = communicator_for(mesh.communicator(), &backend)?;
    Ok(mesh.on_backend(backend, communicator)?)
}

/// Tells this process from all others.
fn process() -> [u8; 12] {
    use std::hash::{BuildHasher, RandomState};

    static KEY: OnceLock<u64> = OnceLock::new();
    let key = *KEY.get_or_init(|| RandomState::new().hash_one("process"));
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&key.to_ne_bytes());
    bytes[8..].copy_from_slice(&std::process::id().to_ne_bytes());
    bytes
}

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

#[cfg(feature = "nccl")]
fn by_nccl(control: &Arc<dyn Communicator>, device: &CudaDevice) -> Result<Arc<dyn Communicator>> {
    use crate::comm::nccl::{NcclComm, NcclError, NcclOptions};

    match NcclComm::new(control.clone(), device, NcclOptions::default()) {
        Ok(communicator) => Ok(communicator),
        Err(NcclError::Library(error)) => Err(error.into()),
        Err(NcclError::Comm(error)) => Err(error.into()),
        Err(error) => Err(Error::Config(error.to_string())),
    }
}

#[cfg(not(feature = "nccl"))]
fn by_nccl(_: &Arc<dyn Communicator>, _: &CudaDevice) -> Result<Arc<dyn Communicator>> {
    Err(Error::Config("ranks with a GPU each need the feature `nccl` of `fsdp`".into()))
}
