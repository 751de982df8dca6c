//! candle's CUDA tensors on the fake driver.
mod candle;
mod llama;
mod ops;
mod support;
