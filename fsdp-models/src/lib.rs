//! Fused ops, layers, Llama, data and a trainer on top of the fsdp crate.

pub mod checkpoint;
pub mod config;
pub mod data;
pub mod error;
pub mod generate;
pub mod layers;
pub mod llama;
pub mod lora;
pub mod ops;
pub mod paths;
pub mod pretrained;
mod product;
mod random;
pub mod settings;
pub mod tokenizer;
pub mod trainer;

pub use config::LlamaConfig;
pub use error::{Error, Result};
pub use llama::Llama;
pub use product::TooMany;
pub use tokenizer::Tokenizer;
