//! Fused ops, layers, Llama, data and a trainer on top of the [`fsdp`] crate.
//!
//! This crate uses only the public API of `fsdp`: a model of your own can do all that these do.
//!
//! - [`ops`]: fused operations with a backward, on candle tensors.
//! - [`layers`], [`llama`], [`lora`]: modules that derive `FsdpUnit`.
//! - [`pretrained`], [`tokenizer`]: Hugging Face directories, GGUF files and tokenizers.
//! - [`data`], [`trainer`], [`generate`]: training a Llama, and looking at its completions.
//! - [`checkpoint`]: inspecting, comparing and exporting checkpoints.
//!
//! Modules are layers, lowest first; each imports only from those above it in this list.

#![warn(missing_debug_implementations)]

mod product;

mod random;

mod run;

pub mod settings;

pub mod ops;

pub mod error;

pub mod paths;

pub mod config;

mod rope;

pub mod layers;

mod adapter;

pub mod llama;

mod generation;

mod gguf;

pub mod tokenizer;

pub mod data;

pub mod pretrained;

pub mod lora;

pub mod generate;

pub mod trainer;

pub mod checkpoint;

pub use config::LlamaConfig;
pub use error::{Error, Result};
pub use llama::Llama;
pub use product::TooMany;
pub use tokenizer::Tokenizer;

/// The README's example, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
