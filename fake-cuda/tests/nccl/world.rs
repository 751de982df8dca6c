//! Ranks as threads, each with a device, a stream and a communicator.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DeviceRepr};
use cudarc::nccl::sys::{self, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclResult_t, ncclUniqueId};

pub struct Rank {
    pub rank: usize,
    pub ranks: usize,
    pub context: Arc<CudaContext>,
    pub stream: Arc<CudaStream>,
    pub comm: ncclComm_t,
}

/// What the calls of a rank take: a pointer to memory on its device.
pub fn at<T>(slice: &CudaSlice<T>) -> *mut c_void {
    slice.device_ptr(slice.stream()).0 as *mut c_void
}

pub fn check(code: ncclResult_t) {
    assert_eq!(code, ncclResult_t::ncclSuccess);
}

impl Rank {
    pub fn upload<T: DeviceRepr>(&self, values: &[T]) -> CudaSlice<T> {
        self.stream.clone_htod(values).expect("room")
    }

    pub fn download<T: DeviceRepr>(&self, slice: &CudaSlice<T>) -> Vec<T> {
        self.stream.clone_dtoh(slice).expect("a copy")
    }

    pub fn cu_stream(&self) -> sys::cudaStream_t {
        self.stream.cu_stream().cast()
    }

    pub fn async_error(&self) -> ncclResult_t {
        async_error(self.comm)
    }

    pub fn abort(&self) {
        // SAFETY: the communicator is the rank's own.
        check(unsafe { sys::ncclCommAbort(self.comm) });
    }
}

pub fn async_error(comm: ncclComm_t) -> ncclResult_t {
    let mut error = ncclResult_t::ncclSuccess;
    // SAFETY: the communicator is alive in the tests that ask.
    check(unsafe { sys::ncclCommGetAsyncError(comm, &mut error) });
    error
}

pub fn unique_id() -> ncclUniqueId {
    cudarc::nccl::result::get_uniqueid().expect("an id")
}

/// `NCCL_CONFIG_INITIALIZER`, and whether calls block.
pub fn config(blocking: bool) -> ncclConfig_t {
    const UNDEFINED: i32 = i32::MIN;
    // SAFETY: integers and pointers, all of which may be zero.
    let mut config: ncclConfig_t = unsafe { std::mem::zeroed() };
    config.size = size_of::<ncclConfig_t>();
    config.magic = 0xcafe_beef;
    config.version = 22_800;
    config.blocking = i32::from(blocking);
    for field in [
        &mut config.cgaClusterSize,
        &mut config.minCTAs,
        &mut config.maxCTAs,
        &mut config.splitShare,
        &mut config.trafficClass,
    ] {
        *field = UNDEFINED;
    }
    config
}

/// A context in which only explicit waits order streams, and a stream of it.
pub fn device(ordinal: usize) -> (Arc<CudaContext>, Arc<CudaStream>) {
    let context = CudaContext::new(ordinal).expect("a context");
    // SAFETY: the tests order the streams themselves, or mean not to.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream().expect("a stream");
    (context, stream)
}

/// Runs `body` on each of `ranks` threads, whose communicators it destroys afterwards unless they were aborted.
pub fn launch<R: Send>(ranks: usize, body: impl Fn(&Rank) -> R + Sync) -> Vec<R> {
    let id = unique_id();
    on_threads(ranks, |rank| {
        let (context, stream) = device(rank);
        let mut comm = std::ptr::null_mut();
        // SAFETY: the call writes the communicator.
        check(unsafe { sys::ncclCommInitRank(&mut comm, ranks as i32, id, rank as i32) });
        let rank = Rank { rank, ranks, context, stream, comm };
        let result = body(&rank);
        rank.context.synchronize().expect("all has run");
        // SAFETY: the communicator is the rank's own; an aborted one is void, and its handle says so.
        let code = unsafe { sys::ncclCommDestroy(rank.comm) };
        assert!(matches!(code, ncclResult_t::ncclSuccess | ncclResult_t::ncclInvalidArgument));
        result
    })
}

pub fn on_threads<R: Send>(ranks: usize, body: impl Fn(usize) -> R + Sync) -> Vec<R> {
    let body = &body;
    std::thread::scope(|scope| {
        let threads = (0..ranks).map(|rank| {
            let thread = std::thread::Builder::new().name(format!("rank{rank}"));
            thread.spawn_scoped(scope, move || body(rank)).expect("a thread")
        });
        let threads = threads.collect::<Vec<_>>();
        threads.into_iter().map(|thread| thread.join().expect("a rank that ends")).collect()
    })
}

/// A type that NCCL sums.
pub trait Element: DeviceRepr + Copy + Send + Sync + std::fmt::Debug + PartialEq {
    const TYPE: ncclDataType_t;
    fn of(value: f32) -> Self;
    fn value(self) -> f32;
}

macro_rules! element {
    ($type:ty, $dtype:ident, $of:expr, $value:expr) => {
        impl Element for $type {
            const TYPE: ncclDataType_t = ncclDataType_t::$dtype;
            fn of(value: f32) -> Self {
                $of(value)
            }
            fn value(self) -> f32 {
                $value(self)
            }
        }
    };
}

element!(f32, ncclFloat32, |x| x, |x| x);
element!(half::bf16, ncclBfloat16, half::bf16::from_f32, half::bf16::to_f32);
element!(half::f16, ncclFloat16, half::f16::from_f32, half::f16::to_f32);
element!(i32, ncclInt32, |x| x as i32, |x| x as f32);

/// Values that rounding makes depend on the order of a sum.
pub fn values<T: Element>(rank: usize, len: usize) -> Vec<T> {
    let value = |i: usize| ((rank * 7919 + i * 104_729) % 1000) as f32 * 0.037 - 11.0 + rank as f32 * 300.0;
    (0..len).map(|i| T::of(value(i))).collect()
}
