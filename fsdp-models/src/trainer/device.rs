//! The device of a training run.

use std::fmt;
use std::str::FromStr;

use candle_core::Device;
use fsdp::launch::World;

use super::TrainError;

/// What the ranks of a run compute on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TrainDevice {
    /// The CPU.
    #[default]
    Cpu,
    /// CUDA devices (feature `cuda`): ranks of one machine take its devices in turn. Ranks that are threads may share one.
    Cuda,
}

impl TrainDevice {
    /// Fails if this program or this machine cannot compute there: what can be known before ranks are started.
    ///
    /// # Errors
    /// For CUDA, if the program was built without it, the driver is missing, or there is no device.
    pub fn check(self) -> crate::Result<()> {
        match self {
            TrainDevice::Cpu => Ok(()),
            TrainDevice::Cuda => cuda_devices().map(|_| ()),
        }
    }

    /// candle's device of this rank: on CUDA the one of number [`World::local_rank`] modulo their count, with a stream of
    /// its own. For [`OnDevice::on`](fsdp::OnDevice::on), once a rank.
    ///
    /// # Errors
    /// Those of [`TrainDevice::check`] and of the device.
    pub fn of_rank(self, world: &World) -> crate::Result<Device> {
        match self {
            TrainDevice::Cpu => Ok(Device::Cpu),
            TrainDevice::Cuda => cuda_device(world.local_rank() % cuda_devices()?),
        }
    }
}

#[cfg(feature = "cuda")]
fn cuda_devices() -> crate::Result<usize> {
    match fsdp::cuda::device_count().map_err(fsdp::Error::from)? {
        0 => Err(TrainError::NoCudaDevice.into()),
        count => Ok(count),
    }
}

#[cfg(feature = "cuda")]
fn cuda_device(ordinal: usize) -> crate::Result<Device> {
    Ok(fsdp::cuda::device(ordinal).map_err(fsdp::Error::from)?)
}

#[cfg(not(feature = "cuda"))]
fn cuda_devices() -> crate::Result<usize> {
    Err(TrainError::BuiltWithoutCuda.into())
}

#[cfg(not(feature = "cuda"))]
fn cuda_device(_: usize) -> crate::Result<Device> {
    Err(TrainError::BuiltWithoutCuda.into())
}

impl FromStr for TrainDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "cpu" => Ok(TrainDevice::Cpu),
            "cuda" => Ok(TrainDevice::Cuda),
            _ => Err("expected cpu or cuda".into()),
        }
    }
}

impl fmt::Display for TrainDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TrainDevice::Cpu => "cpu",
            TrainDevice::Cuda => "cuda",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for device in [TrainDevice::Cpu, TrainDevice::Cuda] {
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        assert_eq!("gpu".parse::<TrainDevice>(), Err("expected cpu or cuda".into()));
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_program_without_cuda_says_how_to_build_it() {
        let message = TrainDevice::Cuda.check().unwrap_err().to_string();
        assert_eq!(message, "this program was built without CUDA: build it with `--features cuda`");
        TrainDevice::Cpu.check().unwrap();
    }
}
