//! Memory that communicators may register, and its registration.

use std::fmt;
use std::ptr::{NonNull, null_mut};

use cudarc::driver::sys::CUresult;
use cudarc::nccl::sys::{self, ncclComm_t, ncclResult_t, ncclWindow_t};

use super::library::{self, Failure, outcome};
use crate::comm::CommError;
use crate::device::cuda::{CudaDevice, GiveBack};
use crate::device::{Block, Memory, Slice};

/// Memory of a device that NCCL has allocated: it stays where it is, and communicators may register it. It is allocated
/// and freed at once, not in the order of a stream: the host waits for the device when it is freed. For the buffers of a
/// fixed pool.
#[derive(Clone)]
pub struct NcclMemory(CudaDevice);

impl NcclMemory {
    /// That of `device`.
    pub fn new(device: &CudaDevice) -> NcclMemory {
        NcclMemory(device.clone())
    }
}

impl fmt::Debug for NcclMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NcclMemory({})", self.0.name())
    }
}

impl Memory for NcclMemory {
    fn allocate(&self, bytes: usize) -> Result<Box<dyn Block>, CommError> {
        let NcclMemory(device) = self;
        if bytes == 0 {
            return device.memory().allocate(0);
        }
        device.check()?;
        device.bind()?;
        let exhausted = |why: String| {
            let message = format!("{bytes} bytes cannot be allocated by NCCL: {why}");
            CommError::Memory { device: device.name().to_owned(), message }
        };
        library::require().map_err(|error| exhausted(error.to_string()))?;
        let mut ptr = null_mut();
        // SAFETY: the call writes an address.
        let code = unsafe { sys::ncclMemAlloc(&mut ptr, bytes) };
        outcome("ncclMemAlloc", null_mut(), code).map_err(|failure| exhausted(failure.to_string()))?;
        let ptr = NonNull::new(ptr.cast::<u8>()).ok_or_else(|| exhausted("it gave no address".to_owned()))?;
        let give_back: GiveBack = Box::new(|ptr| {
            // SAFETY: it was allocated below by `ncclMemAlloc`, and no stream uses it any more.
            match unsafe { sys::ncclMemFree(ptr.as_ptr().cast()) } {
                ncclResult_t::ncclSuccess => Ok(()),
                _ => CUresult::CUDA_ERROR_UNKNOWN.result(),
            }
        });
        // SAFETY: the memory is new.
        unsafe { device.adopt(ptr, bytes, give_back) }
    }
}

/// How memory is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Registration {
    /// As a buffer (`ncclCommRegister`): by each rank for itself.
    Buffer,
    /// As a symmetric window (`ncclCommWindowRegister`): by all ranks together, the same sizes in the same order. Needs
    /// NCCL 2.27.
    Window,
}

/// Memory that a communicator has registered, and keeps.
pub(super) enum Registered {
    Buffer(Slice, *mut std::ffi::c_void),
    Window(Slice, ncclWindow_t),
}

// SAFETY: the handles are those of a communicator, which has no thread affinity; its lock keeps calls apart.
unsafe impl Send for Registered {}

impl Registered {
    /// # Safety
    /// `comm` is alive and ready. The slice is memory of NCCL's.
    pub(super) unsafe fn new(
        comm: ncclComm_t,
        slice: &Slice,
        how: Registration,
    ) -> Result<Registered, Failure> {
        let (ptr, bytes) = (slice.as_ptr().cast(), slice.bytes());
        match how {
            Registration::Buffer => {
                let mut handle = null_mut();
                // SAFETY: the call writes a handle; the memory is there until it is given up.
                let code = unsafe { sys::ncclCommRegister(comm, ptr, bytes, &mut handle) };
                outcome("ncclCommRegister", comm, code)?;
                Ok(Registered::Buffer(slice.clone(), handle))
            }
            Registration::Window => {
                const SYMMETRIC: i32 = 1;
                let mut window = null_mut();
                // SAFETY: as above.
                let code = unsafe { sys::ncclCommWindowRegister(comm, ptr, bytes, &mut window, SYMMETRIC) };
                outcome("ncclCommWindowRegister", comm, code)?;
                Ok(Registered::Window(slice.clone(), window))
            }
        }
    }

    pub(super) fn slice(&self) -> &Slice {
        match self {
            Registered::Buffer(slice, _) | Registered::Window(slice, _) => slice,
        }
    }

    /// # Safety
    /// `comm` is the communicator that has registered it, alive, and nothing on it is under way.
    pub(super) unsafe fn end(&self, comm: ncclComm_t) -> Result<(), Failure> {
        match *self {
            Registered::Buffer(_, handle) => {
                // SAFETY: the caller's promise.
                outcome("ncclCommDeregister", comm, unsafe { sys::ncclCommDeregister(comm, handle) })
            }
            Registered::Window(_, window) => {
                // SAFETY: the caller's promise.
                outcome("ncclCommWindowDeregister", comm, unsafe {
                    sys::ncclCommWindowDeregister(comm, window)
                })
            }
        }
    }
}
