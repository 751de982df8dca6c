//! Llama trained through the public API: the same curves as PyTorch's, the same bits however it is sharded; adapters and
//! completions.

mod bit_equality;
mod generate;
mod harness;
mod lora;
mod reference_curves;
