//! Fused ops, layers, Llama, data and a trainer on top of the fsdp crate.

pub mod ops;
