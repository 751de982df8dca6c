//! Sessions with the fake driver, or none with a real device.

use candle_core::Device;
use fake_cuda::{Schedule, Session};
use fsdp::launch::World;

/// Where tests run.
pub(crate) fn is_real() -> bool {
    std::env::var("FSDP_CUDA").is_ok_and(|place| place == "real")
}

/// Calls `run` in every schedule of the fake driver, each in a session of its own; once on a real device.
pub(crate) fn in_schedules(random: u64, mut run: impl FnMut(&str)) {
    if is_real() {
        return run("on the device");
    }
    for schedule in Schedule::all(random) {
        let session = Session::with_all_kernels(schedule);
        run(&format!("{schedule:?}"));
        drop(session);
    }
}

/// How ranks are on devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    Cpu,
    /// All on one.
    OneDevice,
    /// Each has one.
    ADeviceEach,
}

impl On {
    pub(crate) fn device(self, world: &World) -> fsdp::Result<Device> {
        match self {
            On::Cpu => Ok(Device::Cpu),
            On::OneDevice => Ok(fsdp::cuda::device(0)?),
            On::ADeviceEach => Ok(fsdp::cuda::device(world.local_rank())?),
        }
    }
}
