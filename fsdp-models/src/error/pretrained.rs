//! Errors of reading and writing pretrained models.

use std::path::PathBuf;

use fsdp::files::{FileError, StoredDtype, brief, said};

use crate::settings::SettingsError;

/// What can be wrong with pretrained weights beyond what is wrong with one safetensors file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PretrainedError {
    /// A file cannot be opened, read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not what it claims to be.
    #[error("`{}` is not a valid GGUF file: at byte {offset}: {}", .path.display(), said(.reason))]
    Gguf {
        /// The file.
        path: PathBuf,
        /// Where, in bytes from its start.
        offset: u64,
        /// What is wrong there.
        reason: String,
    },
    /// What a GGUF file says of its model cannot be used.
    #[error("`{}`: `{}` {}", .path.display(), brief(.key), said(.reason))]
    Metadata {
        /// The file.
        path: PathBuf,
        /// The key of its metadata.
        key: String,
        /// What came and what was expected.
        reason: String,
    },
    /// Settings that would make another model of it.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// A file beside the weights that cannot be understood.
    #[error("`{}` is not a JSON object: {}", .path.display(), said(.cause))]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        cause: serde_json::Error,
    },
    /// A directory without weights.
    #[error("`{}` has neither model.safetensors nor model.safetensors.index.json", .path.display())]
    NoWeights {
        /// The directory.
        path: PathBuf,
    },
    /// An index of several files that is damaged, or not the index of these files.
    #[error("`{}` is not the index of its files: {}", .path.display(), said(.reason))]
    Index {
        /// The index.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A configuration that cannot be that of the weights.
    #[error("`{}` is of another model than its configuration: {}", .path.display(), said(.reason))]
    Contradiction {
        /// The weights.
        path: PathBuf,
        /// What differs.
        reason: String,
    },
    /// Two tensors that one parameter would be loaded from.
    #[error(
        "`{}`: `{}` differs from `{}`, and the model ties them: it has one parameter for both",
        .path.display(), brief(.other), brief(.read)
    )]
    Tied {
        /// The file.
        path: PathBuf,
        /// The tensor that would be read.
        read: String,
        /// The one that would be passed over.
        other: String,
    },
    /// A finite value that would be stored as an infinite one.
    #[error("element {element} of `{}` is {value}: it becomes infinite in {dtype:?}", brief(.name))]
    Overflow {
        /// The tensor.
        name: String,
        /// Which element of it, flattened.
        element: usize,
        /// Its value.
        value: f32,
        /// What it was to be stored in.
        dtype: StoredDtype,
    },
    /// A model that is not a plain one.
    #[error(
        "the model has adapters, {count} tensors of which `{name}` is the first: `save_merged` saves it with them merged, \
         `save_adapters` saves them alone"
    )]
    Adapted {
        /// The first of the adapters' tensors.
        name: String,
        /// How many there are.
        count: usize,
    },
    /// A parameter of which each rank has a part by tensor parallelism.
    #[error("parameter `{name}` is cut in {parts} by tensor parallelism: only whole ones can be saved")]
    Cut {
        /// The parameter.
        name: String,
        /// Its parts.
        parts: usize,
    },
}
