//! Both pipelines on CUDA streams, compiled from their own source, driven as the model check drives them on the CPU: two
//! steps of training in ways that are drawn, with every weight that is handed out and every gradient checked on the device.
//!
//! The driver runs each stream as late as its waits allow, as early as they do, or at random: a wait that is missing gives
//! stale values, or is found as a race, or as memory that is freed while it is used.

use fsdp_runtime::{buffer, comm, device, launch, layout, spec, trace};

mod memory;

#[allow(dead_code, unused_imports)]
#[path = "../../../../fsdp-runtime/src/pipeline/mod.rs"]
mod pipeline;

mod check;
mod place;
#[allow(dead_code)]
#[path = "../../../model/src/pipelines/rank.rs"]
mod rank;
#[path = "../../../model/src/pipelines/setting.rs"]
mod setting;

use fake_cuda::{Schedule, Session, register_fsdp_kernels};
use fsdp_runtime::device::cuda::{CudaDevice, CudaOptions, KernelImage};
use fsdp_runtime::launch::{LaunchError, World};

use self::place::Shared;
use self::rank::Rank;
use self::setting::Setting;

/// Trains with `seed`'s setting on ranks that share one device.
fn train(inner: usize, outer: usize, seed: u64, fuse: Option<(usize, usize)>) -> Result<(), LaunchError> {
    check::seed(seed);
    let setting = Setting { device: true, ..Setting::choose(inner, outer) };
    let options = CudaOptions { kernels: KernelImage::Ptx(register_fsdp_kernels()) };
    launch::local(inner * outer, |world: World| -> fsdp_runtime::Result<()> {
        let device = CudaDevice::open(0, &options).expect("the fake driver has a device");
        let fuse = fuse.filter(|(rank, _)| *rank == world.rank()).map(|(_, uses)| uses);
        Ok(Rank::new(Shared::new(device), setting, &world, fuse)?.train()?)
    })
    .map(drop)
}

fn schedules(seed: u64) -> Schedule {
    match seed % 3 {
        0 => Schedule::Latest,
        1 => Schedule::Random(seed),
        _ => Schedule::Earliest,
    }
}

fn trained(inner: usize, outer: usize, runs: u64) {
    for seed in 0..runs {
        let session = Session::new(schedules(seed));
        place::register(&session);
        let outcome = train(inner, outer, seed, None);
        if let Err(error) = outcome {
            panic!("seed {seed}: {error}");
        }
        if let Some(wrong) = place::take_wrong() {
            panic!("seed {seed}: {wrong}");
        }
    }
}

#[test]
fn one_rank_trains() {
    trained(1, 1, 30);
}

#[test]
fn two_ranks_train() {
    trained(2, 1, 150);
}

#[test]
fn two_outer_ranks_train() {
    trained(1, 2, 60);
}

#[test]
fn two_by_two_ranks_train() {
    trained(2, 2, 60);
}

#[test]
fn four_ranks_train() {
    trained(4, 1, 30);
}
