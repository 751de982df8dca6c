//! The kernels on the host: the same text, compiled as C++ behind an emulation of CUDA.
//!
//! A thread of CUDA is a fiber; which one runs next, and in which order blocks run, is drawn from a seed. Accesses to
//! shared memory are checked for bounds, for races and for reads of what was not written, those to global memory for
//! bounds, alignment and races where [`launch`] is told of all of it. Meant for tests: it is some thousand times slower
//! than a device.

use std::ffi::c_void;
use std::fmt;
use std::mem::size_of;

use crate::{Args, Launch};

/// Why a kernel did not run to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostError {
    /// The kernels were not built for the host: no C++ compiler was found, or the target has no emulation.
    NotBuilt,
    /// There is no kernel of this name that takes arguments of this size.
    Unknown(String),
    /// What the emulation found, with kernel, block and thread.
    Fault(String),
}

impl fmt::Display for HostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HostError::NotBuilt => f.write_str("the kernels were built without a C++ compiler for the host"),
            HostError::Unknown(what) | HostError::Fault(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for HostError {}

/// Global memory that a kernel may use.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Memory {
    begin: *mut u8,
    bytes: usize,
    writable: u32,
}

impl Memory {
    /// `bytes` bytes from `begin` on, which the kernel may only read unless `writable`.
    pub fn new(begin: *mut u8, bytes: usize, writable: bool) -> Self {
        Memory { begin, bytes, writable: writable.into() }
    }
}

/// Whether the kernels were built for the host.
pub const fn available() -> bool {
    cfg!(host_kernels)
}

/// Runs a kernel to its end, in this thread.
///
/// With `memory`, every access to global memory is checked to be in one of these ranges, and to race with no other.
/// Seed 0 runs blocks and threads in order, any other in an order of its own.
///
/// # Errors
/// [`HostError`]. Memory is in an unspecified state then.
///
/// # Safety
/// What `args` points to is memory of this process that the kernel may use as its documentation says: `memory`, or,
/// if that is empty, memory that nothing checks.
pub unsafe fn launch<A: Args>(
    kernel: &str,
    launch: Launch,
    args: &A,
    memory: &[Memory],
    seed: u64,
) -> Result<(), HostError> {
    // SAFETY: the caller's promise; the arguments' size is passed along.
    unsafe { launch_raw(kernel, launch, std::ptr::from_ref(args).cast(), Some(size_of::<A>()), memory, seed) }
}

/// [`launch`] for arguments known by address, as a driver is given them.
///
/// # Errors
/// Those of [`launch`]; the arguments' size is compared if it is given.
///
/// # Safety
/// As for [`launch`], and `args` points to the struct that the kernel takes.
pub unsafe fn launch_raw(
    kernel: &str,
    launch: Launch,
    args: *const c_void,
    args_size: Option<usize>,
    memory: &[Memory],
    seed: u64,
) -> Result<(), HostError> {
    if !available() {
        return Err(HostError::NotBuilt);
    }
    match kernels().iter().find(|(name, _)| *name == kernel) {
        None => return Err(HostError::Unknown(format!("there is no kernel {kernel}"))),
        Some((_, size)) => {
            if let Some(got) = args_size.filter(|got| got != size) {
                let what = format!("{kernel} takes arguments of {size} bytes, got {got}");
                return Err(HostError::Unknown(what));
            }
        }
    }
    // SAFETY: the caller's promise.
    match unsafe { built::launch(kernel, launch, args, memory, seed) } {
        None => Ok(()),
        Some(fault) => Err(HostError::Fault(fault)),
    }
}

/// The kernels that were built, each with the size of its arguments. Beside those of
/// [`FAMILIES`](crate::FAMILIES) there are some named `faulty_..`, with which the emulation is tested.
pub fn kernels() -> Vec<(String, usize)> {
    (0..).map_while(built::kernel).collect()
}

#[cfg(host_kernels)]
mod built {
    use std::ffi::{CStr, CString, c_char, c_void};

    use super::{Launch, Memory};

    unsafe extern "C" {
        fn fsdp_kernels_host_kernel(index: usize, args_size: *mut usize) -> *const c_char;
        fn fsdp_kernels_host_launch(
            name: *const c_char,
            grid_x: u32,
            grid_y: u32,
            threads: u32,
            shared_bytes: usize,
            args: *const c_void,
            memory: *const Memory,
            memory_count: usize,
            seed: u64,
        ) -> *const c_char;
    }

    pub fn kernel(index: usize) -> Option<(String, usize)> {
        let mut args_size = 0;
        // SAFETY: the function writes a size, and returns null or a string of static life.
        let name = unsafe {
            let name = fsdp_kernels_host_kernel(index, &mut args_size);
            if name.is_null() {
                return None;
            }
            CStr::from_ptr(name)
        };
        Some((name.to_string_lossy().into_owned(), args_size))
    }

    /// # Safety
    /// As for [`super::launch_raw`]; there is such a kernel.
    pub unsafe fn launch(
        kernel: &str,
        launch: Launch,
        args: *const c_void,
        memory: &[Memory],
        seed: u64,
    ) -> Option<String> {
        let name = CString::new(kernel).expect("the name is one of a kernel");
        let [grid_x, grid_y] = launch.grid;
        // SAFETY: the pointers are valid for the call. The function returns null or a string that lives until this
        // thread calls it again; it is copied here.
        unsafe {
            let fault = fsdp_kernels_host_launch(
                name.as_ptr(),
                grid_x,
                grid_y,
                launch.threads,
                launch.shared_bytes as usize,
                args,
                memory.as_ptr(),
                memory.len(),
                seed,
            );
            (!fault.is_null()).then(|| CStr::from_ptr(fault).to_string_lossy().into_owned())
        }
    }
}

#[cfg(not(host_kernels))]
mod built {
    use std::ffi::c_void;

    use super::{Launch, Memory};

    pub fn kernel(_: usize) -> Option<(String, usize)> {
        None
    }

    /// # Safety
    /// None is needed: nothing runs.
    pub unsafe fn launch(_: &str, _: Launch, _: *const c_void, _: &[Memory], _: u64) -> Option<String> {
        None
    }
}
