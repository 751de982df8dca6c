//! Pretrained models: Hugging Face's directories and GGUF files.

mod error;
pub(crate) mod gguf;

pub use error::PretrainedError;
pub use gguf::GgufFile;
