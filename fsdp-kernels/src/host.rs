//! The kernels on the host: the same text, compiled as C++ behind an emulation of CUDA.
//!
//! A thread of CUDA is a fiber; which one runs next, and in which order blocks run, is drawn from a seed. Accesses to
//! shared memory are checked for bounds, for races and for reads of what was not written, those to global memory for
//! bounds, alignment and races where [`launch`] is told of all of it. Meant for tests: it is some thousand times slower
//! than a device.
//!
//! # Behind a driver that runs kernels as functions
//! For each of [`Kernel::all`](crate::Kernel::all): the only parameter has
//! [`args_size`](crate::Kernel::args_size) bytes; when a launch is submitted,
//! [`accesses`](crate::Kernel::accesses) of a copy of them says what it reads and writes; when it is its turn,
//! [`launch_raw`] runs it, with these accesses as `memory` if what it touches is to be checked.
//!
//! ```
//! use std::ffi::c_void;
//!
//! use fsdp_kernels::host::{self, HostError};
//! use fsdp_kernels::{Args, CastArgs, Dtype, Kernel, cast};
//!
//! let (from, mut to) = ([1.0f32, 2.0, 3.0], [0u16; 3]);
//! let args = CastArgs { from: from.as_ptr() as u64, to: to.as_mut_ptr() as u64, len: 3 };
//! let bytes: *const c_void = (&raw const args).cast();
//! let kernel = Kernel::find(cast(Dtype::F32, Dtype::BF16)).expect("there is one for all dtypes");
//! // SAFETY: the arguments are those of the kernel.
//! let memory = unsafe { kernel.accesses(bytes) };
//! // SAFETY: the arrays have three elements and outlive the call, in which nothing else uses them.
//! match unsafe { host::launch_raw(kernel.name(), args.launch(8).expect("not empty"), bytes, &memory, 0) } {
//!     Ok(()) => assert_eq!(to, [0x3f80, 0x4000, 0x4040]),
//!     Err(HostError::NotBuilt) => {}
//!     Err(error) => panic!("{error}"),
//! }
//! ```

use std::ffi::c_void;
use std::fmt;
use std::mem::size_of;

use crate::{Access, Args, Launch};

/// Why a kernel did not run to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
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

/// Whether the kernels were built for the host.
pub const fn available() -> bool {
    cfg!(host_kernels)
}

/// Runs a kernel to its end, in this thread.
///
/// With `memory`, every access to global memory is checked to be in one of these ranges, and to race with no other;
/// none may overlap another. Seed 0 runs blocks and threads in order, any other in an order of its own.
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
    memory: &[Access],
    seed: u64,
) -> Result<(), HostError> {
    let (expected, got) = (args_size(kernel)?, size_of::<A>());
    if got != expected {
        let what = format!("{kernel} takes arguments of {expected} bytes, got {got}");
        return Err(HostError::Unknown(what));
    }
    // SAFETY: the caller's promise; the arguments have the kernel's size.
    unsafe { launch_raw(kernel, launch, std::ptr::from_ref(args).cast(), memory, seed) }
}

/// [`launch`] for arguments known by address, as a driver is given them.
///
/// # Errors
/// Those of [`launch`]; the size of the arguments is not known.
///
/// # Safety
/// As for [`launch`], and `args` points to the struct that the kernel takes, at any alignment.
pub unsafe fn launch_raw(
    kernel: &str,
    launch: Launch,
    args: *const c_void,
    memory: &[Access],
    seed: u64,
) -> Result<(), HostError> {
    let size = args_size(kernel)?;
    let mut aligned = vec![0u64; size.div_ceil(8)];
    // SAFETY: the caller promises that many bytes; the copy is as large.
    unsafe { std::ptr::copy_nonoverlapping(args.cast::<u8>(), aligned.as_mut_ptr().cast(), size) };
    // SAFETY: the caller's promise.
    match unsafe { built::launch(kernel, launch, aligned.as_ptr().cast(), memory, seed) } {
        None => Ok(()),
        Some(fault) => Err(HostError::Fault(fault)),
    }
}

/// The kernels that were built, each with the size of its arguments. Beside those of
/// [`FAMILIES`](crate::FAMILIES) there are some named `faulty_..`, with which the emulation is tested.
pub fn kernels() -> Vec<(String, usize)> {
    (0..).map_while(built::kernel).collect()
}

fn args_size(kernel: &str) -> Result<usize, HostError> {
    if !available() {
        return Err(HostError::NotBuilt);
    }
    let known = (0..).map_while(built::kernel).find(|(name, _)| name == kernel);
    known.map(|(_, size)| size).ok_or_else(|| HostError::Unknown(format!("there is no kernel {kernel}")))
}

/// Where the barriers are that launches in this thread have reached, as `file:line`.
pub fn barriers() -> Vec<String> {
    (0..).map_while(built::barrier).collect()
}

/// What `run` returns when its launches pass over one barrier, named by its place in [`barriers`]: to see that the
/// kernel needs it.
pub fn without_barrier<R>(index: usize, run: impl FnOnce() -> R) -> R {
    struct Restore;
    impl Drop for Restore {
        fn drop(&mut self) {
            built::skip_barrier(usize::MAX);
        }
    }
    let _restore = Restore;
    built::skip_barrier(index);
    run()
}

#[cfg(host_kernels)]
mod built {
    use std::ffi::{CStr, CString, c_char, c_void};

    use super::{Access, Launch};

    unsafe extern "C" {
        fn fsdp_kernels_host_kernel(index: usize, args_size: *mut usize) -> *const c_char;
        fn fsdp_kernels_host_barrier(index: usize) -> *const c_char;
        fn fsdp_kernels_host_skip_barrier(index: usize);
        fn fsdp_kernels_host_launch(
            name: *const c_char,
            grid_x: u32,
            grid_y: u32,
            threads: u32,
            shared_bytes: usize,
            args: *const c_void,
            memory: *const Access,
            memory_count: usize,
            seed: u64,
        ) -> *const c_char;
    }

    /// # Safety
    /// `text` is null or a string that lives until the next call into the emulation.
    unsafe fn owned(text: *const c_char) -> Option<String> {
        // SAFETY: the caller's promise.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }

    pub fn kernel(index: usize) -> Option<(String, usize)> {
        let mut args_size = 0;
        // SAFETY: the function writes a size, and returns null or a string of static life.
        let name = unsafe { owned(fsdp_kernels_host_kernel(index, &mut args_size)) }?;
        Some((name, args_size))
    }

    pub fn barrier(index: usize) -> Option<String> {
        // SAFETY: the function returns null or a string that lives until this thread launches again.
        unsafe { owned(fsdp_kernels_host_barrier(index)) }
    }

    pub fn skip_barrier(index: usize) {
        // SAFETY: the function notes a number for this thread.
        unsafe { fsdp_kernels_host_skip_barrier(index) };
    }

    /// # Safety
    /// As for [`super::launch_raw`], and `args` is aligned.
    pub unsafe fn launch(
        kernel: &str,
        launch: Launch,
        args: *const c_void,
        memory: &[Access],
        seed: u64,
    ) -> Option<String> {
        let name = CString::new(kernel).expect("the name is one of a kernel");
        let [grid_x, grid_y] = launch.grid;
        // SAFETY: the pointers are valid for the call. The function returns null or a string that lives until this
        // thread calls it again.
        unsafe {
            owned(fsdp_kernels_host_launch(
                name.as_ptr(),
                grid_x,
                grid_y,
                launch.threads,
                launch.shared_bytes as usize,
                args,
                memory.as_ptr(),
                memory.len(),
                seed,
            ))
        }
    }
}

#[cfg(not(host_kernels))]
mod built {
    use std::ffi::c_void;

    use super::{Access, Launch};

    pub fn kernel(_: usize) -> Option<(String, usize)> {
        None
    }

    pub fn barrier(_: usize) -> Option<String> {
        None
    }

    pub fn skip_barrier(_: usize) {}

    /// # Safety
    /// None is needed: nothing runs.
    pub unsafe fn launch(_: &str, _: Launch, _: *const c_void, _: &[Access], _: u64) -> Option<String> {
        None
    }
}
