//! The fake driver, called as cudarc exposes it and as the runtime's devices do.

mod device;
mod graphs;
mod kernels;
mod loading;
mod memory;
mod mutations;
mod streams;
