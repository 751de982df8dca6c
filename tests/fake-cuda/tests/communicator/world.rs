//! Ranks as threads, each with a device of its own, joined by NCCL.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use fsdp_runtime::comm::nccl::{NcclComm, NcclOptions, Sums};
use fsdp_runtime::comm::tcp::Place;
use fsdp_runtime::comm::{Phase, Tag};
use fsdp_runtime::device::cuda::{CudaDevice, CudaOptions, CudaStream, KernelImage, Priority};
use fsdp_runtime::device::{Slice, Stream, update_f32};
use fsdp_runtime::launch::{LaunchError, Launcher, World};
use fsdp_runtime::spec::Dtype;
use fsdp_test_fake_cuda::register_fsdp_kernels;

/// What ranks return: an error of any kind is the rank's end.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A rank with its device.
pub struct Rank {
    pub world: World,
    pub device: CudaDevice,
    /// The stream that the tests compute on.
    pub compute: Arc<CudaStream>,
    /// The stream of collectives.
    pub side: Arc<CudaStream>,
}

impl Rank {
    pub fn new(world: World, ordinal: usize, options: &CudaOptions) -> Outcome<Rank> {
        let device = CudaDevice::open(ordinal, options)?;
        let compute = device.compute("compute");
        let side = device.stream("side", Priority::High)?;
        Ok(Rank { world, device, compute, side })
    }

    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    pub fn size(&self) -> usize {
        self.world.size()
    }

    /// The communicator of all ranks.
    pub fn join(&self) -> Outcome<Arc<NcclComm>> {
        self.join_with(Sums::Nccl)
    }

    pub fn join_with(&self, sums: Sums) -> Outcome<Arc<NcclComm>> {
        Ok(NcclComm::new(self.world.communicator().clone(), &self.device, NcclOptions { sums })?)
    }

    /// Zeros on the device.
    pub fn zeros(&self, dtype: Dtype, len: usize) -> Outcome<Slice> {
        // SAFETY: the fake driver reports uses that are not ordered.
        Ok(unsafe { Slice::zeros_in(&self.device.memory(), dtype, len, None) }?)
    }

    /// Values on the device, rounded to `dtype`.
    pub fn upload(&self, dtype: Dtype, values: &[f32]) -> Outcome<Slice> {
        // SAFETY: it is written here, and then read by one copy.
        let host = unsafe { Slice::zeros_in(&self.device.pinned(), dtype, values.len(), None) }?;
        // SAFETY: the memory is new, and nobody else has it.
        unsafe { update_f32(&host, |all| all.copy_from_slice(values)) };
        let slice = self.zeros(dtype, values.len())?;
        self.compute.copy(&host, &slice)?;
        Ok(slice)
    }

    /// What the device has, once the side stream has come to its present end.
    pub fn download(&self, slice: &Slice) -> Outcome<Vec<f32>> {
        self.compute.wait(&self.side.record())?;
        // SAFETY: one copy writes it, which is waited for before it is read.
        let host = unsafe { Slice::zeros_in(&self.device.pinned(), slice.dtype(), slice.len(), None) }?;
        self.compute.copy(slice, &host)?;
        self.compute.record().synchronize()?;
        // SAFETY: the copy is over, and nobody else has the memory.
        Ok(unsafe { fsdp_runtime::device::read_f32(&host, <[f32]>::to_vec) })
    }

    /// The side stream may use what the compute stream has made.
    pub fn hand_over(&self) -> Outcome<()> {
        Ok(self.side.wait(&self.compute.record())?)
    }
}

/// Whether the devices are the machine's (`FSDP_CUDA=real`) and not the fake driver's, for tests that need no session.
pub fn is_real() -> bool {
    std::env::var("FSDP_CUDA").is_ok_and(|place| place == "real")
}

fn options() -> CudaOptions {
    let kernels = if is_real() { KernelImage::Compile } else { KernelImage::Ptx(register_fsdp_kernels()) };
    CudaOptions { kernels }
}

/// Runs `body` on `ranks` ranks.
pub fn launch<T: Send>(
    ranks: usize,
    timeout: Duration,
    body: impl Fn(&Rank) -> Outcome<T> + Sync,
) -> Result<Vec<T>, LaunchError> {
    let options = options();
    let launcher = Launcher::new().ranks(ranks).stack_size(1 << 20).timeout(timeout);
    launcher.run(|world| {
        let ordinal = world.rank();
        let rank = Rank::new(world, ordinal, &options).map_err(|error| error.to_string())?;
        body(&rank).map_err(|error| error.to_string())
    })
}

/// Runs `body` on ranks that are joined by TCP, as processes are; what became of each.
pub fn launch_by_tcp<T: Send>(
    ranks: usize,
    timeout: Duration,
    body: impl Fn(&Rank) -> Outcome<T> + Sync,
) -> Vec<Result<T, LaunchError>> {
    let (options, body) = (&options(), &body);
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("there is a free port");
    let port = listener.local_addr().expect("it has an address").port();
    drop(listener);
    std::thread::scope(|scope| {
        let rank = |rank: usize| {
            let address = ("127.0.0.1".to_owned(), port);
            let place = Place { rank, size: ranks, local_rank: rank, address };
            scope.spawn(move || {
                Launcher::new().timeout(timeout).stack_size(1 << 20).join(&place, |world| {
                    let ordinal = world.local_rank();
                    let rank = Rank::new(world, ordinal, options).map_err(|error| error.to_string())?;
                    body(&rank).map_err(|error| error.to_string())
                })
            })
        };
        let ranks = (0..ranks).map(rank).collect::<Vec<_>>();
        ranks.into_iter().map(|rank| rank.join().expect("a launch does not panic")).collect()
    })
}

/// Runs `body` on ranks that must end well.
pub fn run<T: Send>(ranks: usize, body: impl Fn(&Rank) -> Outcome<T> + Sync) -> Vec<T> {
    launch(ranks, Duration::from_secs(20), body).unwrap_or_else(|error| panic!("{error}"))
}

/// The same on ranks that share a device.
pub fn run_on_one_device<T: Send>(ranks: usize, body: impl Fn(&Rank) -> Outcome<T> + Sync) -> Vec<T> {
    let options = options();
    let launched = Launcher::new().ranks(ranks).stack_size(1 << 20).run(|world| {
        let rank = Rank::new(world, 0, &options).map_err(|error| error.to_string())?;
        body(&rank).map_err(|error| error.to_string())
    });
    launched.unwrap_or_else(|error| panic!("{error}"))
}

pub fn tag(unit: &str) -> Tag {
    Tag { unit: unit.into(), phase: Phase::Forward, step: 0 }
}

/// Small integers and their halves: sums of a few are exact in every dtype.
pub fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((rank * 31 + i * 17) % 23) as f32 * 0.5 - 4.0).collect()
}
