//! A device: its context, its compute stream, its kernels, and whether it has failed.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use cudarc::driver as cuda;
use parking_lot::Mutex;

use super::block::{CudaBlock, CudaMemory, PinnedMemory};
use super::error::{on_stream, words};
use super::event::Origin;
use super::kernels::Kernels;
use super::libraries;
use super::stream::{CudaStream, Priority};
use crate::device::cuda::CudaError;
use crate::error::CommError;

/// Where the code of the kernels comes from.
#[derive(Clone, Debug, Default)]
pub enum KernelImage {
    /// Their source is compiled for the device by NVRTC, once a process and architecture.
    #[default]
    Compile,
    /// Code that was compiled before: PTX.
    Ptx(String),
}

/// How a device is opened.
#[derive(Clone, Debug, Default)]
pub struct CudaOptions {
    /// The code of the kernels.
    pub kernels: KernelImage,
}

/// One rank's view of a CUDA device. Ranks may share one: each opens it for itself. Cheap to clone.
#[derive(Clone)]
pub struct CudaDevice(Arc<State>);

pub(super) struct State {
    pub context: Arc<cuda::CudaContext>,
    pub compute: Arc<cuda::CudaStream>,
    pub kernels: Kernels,
    pub origin: Mutex<Option<Arc<Origin>>>,
    pub capture: Capturing,
    name: String,
    failure: Mutex<Option<CommError>>,
}

/// Whether the streams capture what they are given, instead of doing it.
#[derive(Default)]
pub(super) struct Capturing {
    pub active: AtomicBool,
    /// Buffers that were allocated in the present capture and are not freed yet.
    pub blocks: AtomicUsize,
    /// Buffers from before it that were dropped in it: freeing them is not a part of it.
    pub kept: Mutex<Vec<CudaBlock>>,
}

impl CudaDevice {
    /// Opens device `ordinal`, with a compute stream of its own.
    ///
    /// # Errors
    /// If the driver or NVRTC is not installed, there is no such device, or it does not work.
    pub fn open(ordinal: usize, options: &CudaOptions) -> Result<CudaDevice, CudaError> {
        let call = |call| move |error| CudaError::Call { ordinal, call, message: words(error) };
        let count = device_count()?;
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        let context = cuda::CudaContext::new(ordinal).map_err(call("opening the device"))?;
        // SAFETY: nothing is allocated through cudarc's slices; the order of all work is kept by events of our own.
        unsafe { context.disable_event_tracking() };
        let compute = context.new_stream().map_err(call("making the compute stream"))?;
        Self::of(compute, options)
    }

    /// The device of `compute`, on which others submit work too: candle's own stream, `CudaDevice::cuda_stream`.
    ///
    /// # Errors
    /// If NVRTC is not installed, or the kernels do not compile for the device.
    pub fn of(compute: Arc<cuda::CudaStream>, options: &CudaOptions) -> Result<CudaDevice, CudaError> {
        let context = compute.context().clone();
        // SAFETY: as in `open`; candle's slices are allocated, used and freed on its one stream.
        unsafe { context.disable_event_tracking() };
        keep_freed_memory(&context)?;
        let kernels = Kernels::load(&context, &options.kernels)?;
        let name = format!("cuda:{}", context.ordinal());
        let (origin, failure) = (Mutex::default(), Mutex::default());
        let capture = Capturing::default();
        Ok(CudaDevice(Arc::new(State { context, compute, kernels, origin, capture, name, failure })))
    }

    /// Its number among the visible devices.
    pub fn ordinal(&self) -> usize {
        self.0.context.ordinal()
    }

    /// What tells the GPU from all others, whatever its number is in a process.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn uuid(&self) -> Result<[u8; 16], CudaError> {
        let uuid = self.0.context.uuid().map_err(|error| CudaError::Call {
            ordinal: self.ordinal(),
            call: "asking for its id",
            message: words(error),
        })?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    /// `cuda:0`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its memory, allocated in the order of the compute stream.
    pub fn memory(&self) -> CudaMemory {
        CudaMemory::new(self.clone())
    }

    /// Host memory that it copies from and to without a stop.
    pub fn pinned(&self) -> PinnedMemory {
        PinnedMemory::new(self.clone())
    }

    /// The compute stream; `name` is its lane's in traces.
    pub fn compute(&self, name: impl Into<String>) -> Arc<CudaStream> {
        CudaStream::new(self.clone(), self.0.compute.clone(), name.into())
    }

    /// A new stream beside the compute stream.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn stream(&self, name: impl Into<String>, priority: Priority) -> Result<Arc<CudaStream>, CudaError> {
        let failed = |error| CudaError::Call {
            ordinal: self.ordinal(),
            call: "making a stream",
            message: words(error),
        };
        let context = &self.0.context;
        context.bind_to_thread().map_err(failed)?;
        let stream = match priority {
            Priority::Normal => context.new_stream().map_err(failed)?,
            Priority::High => {
                let (_, highest) = cuda::result::stream::get_priority_range().map_err(failed)?;
                context.new_stream_with_priority(highest).map_err(failed)?
            }
        };
        Ok(CudaStream::new(self.clone(), stream, name.into()))
    }

    /// The first failure, if there is one.
    ///
    /// # Errors
    /// That failure.
    pub fn check(&self) -> Result<(), CommError> {
        self.0.failure.lock().clone().map_or(Ok(()), Err)
    }

    /// The device has failed for good: streams refuse work, and waits end.
    pub fn fail(&self, error: CommError) {
        self.0.failure.lock().get_or_insert(error);
    }

    /// Whether its streams capture what they are given. A thread asks that submits to them.
    pub(super) fn is_capturing(&self) -> bool {
        self.0.capture.active.load(Ordering::Relaxed)
    }

    pub(super) fn state(&self) -> &State {
        &self.0
    }

    /// Whether it is the same view: one that fails with this one.
    #[cfg(feature = "nccl")]
    pub(crate) fn is(&self, other: &CudaDevice) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Lets the calling thread ask for events while other threads capture graphs.
    #[cfg(feature = "nccl")]
    pub(crate) fn tolerate_captures(&self) -> Result<(), CommError> {
        let mut mode = cuda::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the call sets this thread's mode, and writes the one it had.
        let code = unsafe { cuda::sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        code.result().map_err(on_stream(self.name(), "setting the mode of captures"))
    }

    /// Makes its context the calling thread's.
    #[cfg(feature = "nccl")]
    pub(crate) fn bind(&self) -> Result<(), CommError> {
        self.0.context.bind_to_thread().map_err(on_stream(self.name(), "binding the context"))
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Number of CUDA devices that are visible to this process.
///
/// # Errors
/// If the driver is not installed or does not work.
pub fn device_count() -> Result<usize, CudaError> {
    require_driver()?;
    let call = |call| move |error| CudaError::Call { ordinal: 0, call, message: words(error) };
    cuda::result::init().map_err(call("initialising the driver"))?;
    let count = cuda::CudaContext::device_count().map_err(call("counting devices"))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// Checks that the driver is there: cudarc panics where it cannot be loaded.
pub(super) fn require_driver() -> Result<(), CudaError> {
    if libraries::has_driver() {
        return Ok(());
    }
    Err(CudaError::MissingLibrary {
        library: "the CUDA driver (libcuda.so.1)",
        install: "install NVIDIA's driver for this machine's GPU, and see that `nvidia-smi` works",
    })
}

/// Has the driver keep what is freed for what is allocated next: by default it gives all of it back whenever the host
/// waits for the device.
fn keep_freed_memory(context: &cuda::CudaContext) -> Result<(), CudaError> {
    let all = u64::MAX;
    let threshold = cuda::sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    let mut pool = std::ptr::null_mut();
    // SAFETY: the first call writes the handle of the device's own pool, which lasts; the attribute is a u64 that the second
    // one reads.
    let set = unsafe {
        cuda::sys::cuDeviceGetDefaultMemPool(&mut pool, context.cu_device()).result().and_then(|()| {
            cuda::sys::cuMemPoolSetAttribute(pool, threshold, (&raw const all).cast_mut().cast()).result()
        })
    };
    set.map_err(|error| CudaError::Call {
        ordinal: context.ordinal(),
        call: "setting up its memory pool",
        message: words(error),
    })
}
