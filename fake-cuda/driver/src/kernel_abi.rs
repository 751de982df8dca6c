//! What a test's kernel and this library hand each other. The test side includes this very file.

use std::ffi::c_void;

/// A launch of a kernel, as its function sees it.
#[repr(C)]
pub struct RawLaunch {
    /// Pointers to the values of the parameters, copied when the kernel was launched.
    pub params: *const *const u8,
    pub count: usize,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    /// Of each parameter, what the host has copied to where it points.
    pub uploads: *const RawUpload,
}

/// Bytes that the launch will find in memory, as they are known when it is submitted; null if they are not.
#[repr(C)]
pub struct RawUpload {
    pub bytes: *const u8,
    pub len: usize,
}

/// Receives one access of a kernel: address, bytes, whether it writes.
pub type AddAccess = extern "C" fn(sink: *mut c_void, address: u64, bytes: usize, writes: bool);

/// Says what a launch reads and writes, when it is submitted.
pub type Declare =
    extern "C" fn(data: *const c_void, launch: *const RawLaunch, sink: *mut c_void, add: AddAccess);

/// Runs a launch.
pub type Run = extern "C" fn(data: *const c_void, launch: *const RawLaunch);
