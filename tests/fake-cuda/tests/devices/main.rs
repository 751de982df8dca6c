//! The runtime's CUDA devices and the kernels of `fsdp-kernels`, on the fake driver.

mod device;
mod kernels;
