//! candle's CUDA tensors, and models that are sharded on them, on the fake driver. With `FSDP_CUDA=real` on the device that
//! is there.

mod candle;
mod engine;
mod support;
