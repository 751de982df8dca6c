//! Why pretrained weights cannot be read or written.

use std::path::PathBuf;

use fsdp::files::FileError;

/// What can be wrong with pretrained weights beyond what is wrong with one safetensors file.
#[derive(Debug, thiserror::Error)]
pub enum PretrainedError {
    /// A file cannot be opened, read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not what it claims to be.
    #[error("`{}` is not a valid GGUF file: at byte {offset}: {reason}", .path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// Where, in bytes from its start.
        offset: u64,
        /// What is wrong there.
        reason: String,
    },
    /// What a GGUF file says of its model cannot be used.
    #[error("`{}`: `{key}` {reason}", .path.display())]
    Metadata {
        /// The file.
        path: PathBuf,
        /// The key of its metadata.
        key: String,
        /// What came and what was expected.
        reason: String,
    },
}
