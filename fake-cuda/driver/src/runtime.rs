//! The CUDA runtime, as far as object files need it that nvcc has made and that are linked into a program: their
//! initialisers announce kernels, which nobody launches. What launches one says that it is not there.

#![allow(non_snake_case)]

use std::ffi::{c_char, c_int};

use crate::abi::Raw;
use crate::report::Kind;
use crate::state::lock;

/// Called before `main`, by each object file with kernels.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinary(_binary: Raw) -> Raw {
    /// What the caller passes back; it is never read.
    static HANDLE: [usize; 1] = [0];
    HANDLE.as_ptr() as Raw
}

/// The functions of object files' initialisers, and what they return.
macro_rules! accepted {
    ($($name:ident)*) => {$(
        /// Declared without parameters: by C's calling convention the caller passes and removes them.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> c_int {
            0
        }
    )*};
}

accepted! {
    __cudaRegisterFatBinaryEnd __cudaUnregisterFatBinary __cudaRegisterFunction __cudaRegisterVar
}

/// `cudaErrorNotSupported`.
const NOT_SUPPORTED: c_int = 801;

macro_rules! missing {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> c_int {
            lock().reports.add(Kind::Unsupported, concat!(stringify!($name), " is not implemented").to_owned());
            NOT_SUPPORTED
        }
    )*};
}

missing! {
    __cudaGetKernel __cudaLaunchKernel_ptsz __cudaPopCallConfiguration __cudaPushCallConfiguration
    cudaDeviceGetAttribute cudaFree cudaFreeAsync_ptsz cudaFuncGetAttributes cudaFuncSetAttribute cudaGetDevice
    cudaGetDeviceCount cudaGetLastError cudaMalloc cudaMallocAsync_ptsz cudaMemsetAsync_ptsz
    cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cudaPeekAtLastError cudaSetDevice
    cudaStreamSynchronize_ptsz
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorString(_error: c_int) -> *const c_char {
    c"the runtime of the fake CUDA driver runs nothing".as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorName(_error: c_int) -> *const c_char {
    c"cudaErrorNotSupported".as_ptr()
}
