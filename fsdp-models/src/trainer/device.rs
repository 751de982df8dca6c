//! The device of a training run.

use std::fmt;
use std::str::FromStr;

use candle_core::Device;
use fsdp::launch::World;

use super::cuda;

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
            TrainDevice::Cuda => cuda::devices().map(|_| ()),
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
            TrainDevice::Cuda => cuda::device(world.local_rank() % cuda::devices()?),
        }
    }
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
}
