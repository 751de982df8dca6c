//! candle's CUDA tensors on the fake driver.
mod candle;
