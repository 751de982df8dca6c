//! The ops, the Llama and the trainer of `fsdp-models`.

mod llama;
mod ops;
