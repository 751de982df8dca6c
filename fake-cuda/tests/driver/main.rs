//! The fake driver, called as cudarc exposes it.

mod graphs;
mod kernels;
mod loading;
mod memory;
mod mutations;
mod streams;
