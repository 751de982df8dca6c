//! Loads the driver under the names of the real libraries, and finds what tests call beside it.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::Library;

use crate::kernel_abi::{Declare, Run};

/// The functions that tests call; what each does is said where it is defined, in the driver's `control.rs`.
pub struct Control {
    pub reset: extern "C" fn(u64, c_int),
    pub report: extern "C" fn(*mut u8, usize) -> usize,
    pub clear_report: extern "C" fn(),
    pub report_leaks: extern "C" fn(),
    pub register_kernel:
        extern "C" fn(*const c_char, *const usize, usize, Declare, Run, *const c_void) -> c_int,
    pub fail_allocation: extern "C" fn(u64),
    pub set_patience: extern "C" fn(u64),
    pub set_devices: extern "C" fn(usize, usize),
    pub set_attribute: extern "C" fn(c_int, c_int),
    pub usage: extern "C" fn(usize, *mut usize, *mut usize),
    pub leave_out: extern "C" fn(c_int, *const c_char, usize, u64),
    pub left_out: extern "C" fn() -> c_int,
    pub steps: extern "C" fn(c_int, *const c_char, usize) -> u64,
    pub pending: extern "C" fn() -> usize,
    pub name_stream: extern "C" fn(usize, *const c_char) -> c_int,
    pub label: extern "C" fn(*const c_char),
    pub host_access: extern "C" fn(usize, usize, bool),
    pub release: extern "C" fn() -> u64,
    pub acquire: extern "C" fn(u64),
    pub lose_device: extern "C" fn(usize, u64, bool),
    pub start_log: extern "C" fn(),
    pub log: extern "C" fn(*mut u8, usize) -> usize,
    pub is_ordered: extern "C" fn(usize, usize) -> bool,
    pub profile: extern "C" fn(*mut u8, usize) -> usize,
}

/// The driver's library.
pub const PATH: &str = concat!(env!("OUT_DIR"), "/libcuda.so");

/// The control functions; the first call loads the driver. Panics if it cannot be loaded under the real names.
pub fn control() -> &'static Control {
    static CONTROL: OnceLock<Control> = OnceLock::new();
    CONTROL.get_or_init(|| {
        // SAFETY: the driver has no initialisers.
        let library = unsafe { Library::new(PATH) };
        let library =
            library.unwrap_or_else(|error| panic!("the fake CUDA driver cannot be loaded: {error}"));
        // Its streams and threads last as long as the process.
        let library: &'static Library = Box::leak(Box::new(library));
        let take_names: extern "C" fn() -> bool = find(library, "fake_cuda_take_names");
        assert!(
            take_names(),
            "another libcuda.so or libnccl.so is loaded in place of the fake one, or the program is linked with one: with \
             candle's CUDA tensors, tests run by `.ci/cuda`"
        );
        Control {
            reset: find(library, "fake_cuda_reset"),
            report: find(library, "fake_cuda_report"),
            clear_report: find(library, "fake_cuda_clear_report"),
            report_leaks: find(library, "fake_cuda_report_leaks"),
            register_kernel: find(library, "fake_cuda_register_kernel"),
            fail_allocation: find(library, "fake_cuda_fail_allocation"),
            set_patience: find(library, "fake_cuda_set_patience"),
            set_devices: find(library, "fake_cuda_set_devices"),
            set_attribute: find(library, "fake_cuda_set_attribute"),
            usage: find(library, "fake_cuda_usage"),
            leave_out: find(library, "fake_cuda_leave_out"),
            left_out: find(library, "fake_cuda_left_out"),
            steps: find(library, "fake_cuda_steps"),
            pending: find(library, "fake_cuda_pending"),
            name_stream: find(library, "fake_cuda_name_stream"),
            label: find(library, "fake_cuda_label"),
            host_access: find(library, "fake_cuda_host_access"),
            release: find(library, "fake_cuda_release"),
            acquire: find(library, "fake_cuda_acquire"),
            lose_device: find(library, "fake_nccl_lose_device"),
            start_log: find(library, "fake_cuda_start_log"),
            log: find(library, "fake_cuda_log"),
            is_ordered: find(library, "fake_cuda_is_ordered"),
            profile: find(library, "fake_cuda_profile"),
        }
    })
}

fn find<F: Copy>(library: &'static Library, name: &str) -> F {
    // SAFETY: the fields of `Control` have the types of the functions they are named after.
    let symbol = unsafe { library.get::<F>(name.as_bytes()) };
    *symbol.unwrap_or_else(|error| panic!("the fake CUDA driver is of another version: {error}"))
}
