//! Memory that communicators may register, and its registration.

use std::ffi::c_void;
use std::fmt;
use std::ptr::{NonNull, null_mut};

use cudarc::driver::sys::CUresult;
use cudarc::nccl::sys::{self, ncclComm_t, ncclResult_t, ncclWindow_t};

use super::library::{self, Failure, outcome};
use crate::comm::{CommError, Registration};
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

// SAFETY: NCCL gives `bytes` bytes, aligned to pages of the device, which are set to zero when they are adopted; nobody else
// knows the address.
unsafe impl Memory for NcclMemory {
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
            // SAFETY: it was allocated above by `ncclMemAlloc`; a block gives it back once, when no stream uses it any more.
            match unsafe { sys::ncclMemFree(ptr.as_ptr().cast()) } {
                ncclResult_t::ncclSuccess => Ok(()),
                _ => CUresult::CUDA_ERROR_UNKNOWN.result(),
            }
        });
        // SAFETY: NCCL has given this memory to this call alone, of `bytes` bytes.
        unsafe { device.adopt(ptr, bytes, give_back) }
    }
}

/// Memory that a communicator has registered, and keeps.
pub(super) enum Registered {
    Buffer(Slice, *mut c_void),
    Window(Slice, LateWindow),
}

// SAFETY: the handles are those of a communicator, which has no thread affinity; its lock keeps calls apart.
unsafe impl Send for Registered {}

/// Room for the handle of a window. A communicator whose calls do not block may write it after the call, until it is
/// ready or aborted.
pub(super) struct LateWindow(NonNull<ncclWindow_t>);

impl LateWindow {
    fn new() -> LateWindow {
        LateWindow(NonNull::from(Box::leak(Box::new(null_mut()))))
    }
}

impl Drop for LateWindow {
    fn drop(&mut self) {
        // SAFETY: `new` has leaked this box. It is dropped once its communicator is ready, gone, or has refused the call.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl Registered {
    /// # Safety
    /// `comm` is alive and ready. The slice is memory of NCCL's. What is returned is kept until the communicator is ready
    /// again or aborted.
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
                let window = LateWindow::new();
                // SAFETY: the memory is there until it is given up, and so is the room for the handle.
                let code =
                    unsafe { sys::ncclCommWindowRegister(comm, ptr, bytes, window.0.as_ptr(), SYMMETRIC) };
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
    /// `comm` is the communicator that has registered it, alive and ready, and nothing on it is under way.
    pub(super) unsafe fn end(&self, comm: ncclComm_t) -> Result<(), Failure> {
        // Where NCCL cannot make use of registered memory it gives no handle.
        match self {
            Registered::Buffer(_, handle) if !handle.is_null() => {
                // SAFETY: the caller's promise.
                outcome("ncclCommDeregister", comm, unsafe { sys::ncclCommDeregister(comm, *handle) })
            }
            Registered::Window(_, window) => {
                // SAFETY: the communicator is ready: nobody writes the handle any more.
                let window = unsafe { *window.0.as_ptr() };
                if window.is_null() {
                    return Ok(());
                }
                // SAFETY: the caller's promise.
                let code = unsafe { sys::ncclCommWindowDeregister(comm, window) };
                outcome("ncclCommWindowDeregister", comm, code)
            }
            Registered::Buffer(..) => Ok(()),
        }
    }
}
