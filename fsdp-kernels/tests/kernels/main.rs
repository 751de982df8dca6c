//! The kernels, run on the host by the emulation of `host/`, against references in f64 and against the arithmetic of
//! the CPU implementations. Nothing is tested where no C++ compiler was found (`FSDP_REQUIRE_HOST_KERNELS` makes that
//! an error).
#![cfg(host_kernels)]

mod accesses;
mod adamw;
mod catalogue;
mod cross_entropy;
mod device;
mod dropout;
mod embedding;
mod emulation;
mod exp;
mod flat;
mod large_indices;
mod norm;
mod number;
mod rms_norm;
mod rope;
mod softmax;
mod swap_dims;
mod swiglu;
