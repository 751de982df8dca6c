//! candle's CUDA tensors, and the engine on them, on the fake CUDA driver: see tests/fake-cuda/README.md. `.ci/cuda`
//! runs them.

mod candle;
mod compare;
mod found;
mod graphs;
mod libraries;
mod ops;
