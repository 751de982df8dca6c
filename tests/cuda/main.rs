//! candle's CUDA tensors, and models that are sharded on them, on the fake driver: see fake-cuda/README.md. `.ci/cuda`
//! runs them. With `FSDP_CUDA=real` those of [`engine`] and [`models`] take the device that is there; the others
//! need the fake one.

mod candle;
mod compare;
mod engine;
mod found;
mod graphs;
mod libraries;
mod models;
mod ops;
mod support;
