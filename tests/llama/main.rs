//! Llama trained through the public API: the same curves as PyTorch's, the same bits however it is sharded.

mod bit_equality;
mod harness;
mod reference_curves;
