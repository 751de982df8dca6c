//! Errors of tokenizers.

use std::path::PathBuf;

use fsdp::files::said;

use crate::settings::SettingsError;

/// Why a tokenizer cannot be had or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The file holds none, or one that cannot be built.
    #[error("`{}` holds no usable tokenizer: {}", .path.display(), said(.reason))]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A setting that would cut text in another way.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The tokenizer refused its input.
    #[error("the tokenizer of `{}` failed to {action}: {}", .path.display(), said(.reason))]
    Failed {
        /// The file it came from.
        path: PathBuf,
        /// `encode`, `decode` or `save`.
        action: &'static str,
        /// Its own words.
        reason: String,
    },
}
