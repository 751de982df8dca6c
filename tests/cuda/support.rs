//! Sessions with the fake driver, or none with a real device.

use candle_core::Device;
use fake_cuda::{Finding, Kind, Schedule};
use fsdp::launch::World;
use fsdp_test_fake_cuda::session;

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
        let session = session(schedule);
        run(&format!("{schedule:?}"));
        drop(session);
    }
}

/// The same where steps are captured as graphs: candle keeps the shapes that it has uploaded for them, some bytes each, for
/// ever, and so its stream; and tensors from before that are dropped in a capture which that makes void are lost. What else is found is a failure.
pub(crate) fn in_schedules_with_graphs(random: u64, mut run: impl FnMut(&str)) {
    if is_real() {
        return run("on the device");
    }
    for schedule in Schedule::all(random) {
        let session = session(schedule);
        run(&format!("{schedule:?}"));
        let found = session.end();
        let is_kept = |finding: &Finding| {
            let bytes = finding.message.split(' ').next().and_then(|bytes| bytes.parse::<usize>().ok());
            let small = finding.message.starts_with("stream") || bytes.is_some_and(|bytes| bytes < 128);
            finding.kind == Kind::Leak && small
        };
        let others: Vec<_> = found.into_iter().filter(|finding| !is_kept(finding)).collect();
        assert!(others.is_empty(), "{schedule:?}: {others:?}");
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
