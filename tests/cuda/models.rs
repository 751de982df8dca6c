//! The ops, the Llama and the trainer of `fsdp-models`.

mod graphs;
mod llama;
mod ops;
