//! Named tensors of a pretrained model, in files of any format.

use std::path::Path;

use fsdp::files::{FoundTensor, TensorFile, TensorFileError};

use super::index::{INDEX, ShardedTensorFiles};
use crate::error::PretrainedError;
use crate::gguf::{GgufFile, is_gguf};

/// A checkpoint of one file.
pub(super) const SINGLE: &str = "model.safetensors";

/// The weights of a pretrained model, of which only names, shapes and places are in memory. Threads may share them.
///
/// Values are read by ranges of elements, with plain reads at an offset and not over a memory map: a file that is cut short
/// while it is read is then an error, and not the end of the process by `SIGBUS`; and what was read counts for a rank's
/// memory no longer than it is used.
#[derive(Debug)]
pub enum Weights {
    /// One safetensors file.
    Single(TensorFile),
    /// Several of them, with an index.
    Sharded(ShardedTensorFiles),
    /// A GGUF file of a Llama, under Hugging Face's names.
    Gguf(GgufFile),
}

impl Weights {
    /// Opens the weights of a directory, `model.safetensors` or else those of `model.safetensors.index.json`, or a file: an
    /// index, a safetensors file or a GGUF file. Reads only; no rank has to do it together with others.
    ///
    /// # Errors
    /// There are none, or they are damaged: see [`TensorFile::open`], [`ShardedTensorFiles::open`], [`GgufFile::open`].
    pub fn open(path: &Path) -> crate::Result<Self> {
        if path.is_dir() {
            let [single, index] = [SINGLE, INDEX].map(|name| path.join(name));
            // As `transformers` does: the single file, if there are both.
            return if single.exists() {
                Ok(Weights::Single(TensorFile::open(&single)?))
            } else if index.exists() {
                Ok(Weights::Sharded(ShardedTensorFiles::open(&index)?))
            } else {
                Err(PretrainedError::NoWeights { path: path.to_path_buf() }.into())
            };
        }
        if is_gguf(path)? {
            Ok(Weights::Gguf(GgufFile::open(path)?))
        } else if path.extension().is_some_and(|extension| extension == "json") {
            Ok(Weights::Sharded(ShardedTensorFiles::open(path)?))
        } else {
            Ok(Weights::Single(TensorFile::open(path)?))
        }
    }

    /// Whether [`Weights::open`] would find something at `path`: it is a file, or a directory that has weights.
    pub(crate) fn are_at(path: &Path) -> bool {
        path.is_file() || [SINGLE, INDEX].iter().any(|name| path.join(name).exists())
    }

    /// The file, or the index of the files.
    pub fn path(&self) -> &Path {
        match self {
            Weights::Single(file) => file.path(),
            Weights::Sharded(files) => files.path(),
            Weights::Gguf(file) => file.path(),
        }
    }

    /// All tensors, sorted by name.
    pub fn found(&self) -> Vec<FoundTensor<'_>> {
        let mut found: Vec<_> = match self {
            Weights::Single(file) => file.found().collect(),
            Weights::Sharded(files) => files.found().collect(),
            Weights::Gguf(file) => file.found().collect(),
        };
        found.sort_by_key(|tensor| tensor.name);
        found
    }

    /// Dims of a tensor, outermost first.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        match self {
            Weights::Single(file) => file.shape(name),
            Weights::Sharded(files) => files.file_of(name)?.shape(name),
            Weights::Gguf(file) => file.shape(name),
        }
    }

    /// Element type of a tensor, as the file has it: `BF16`, `Q8_0`.
    pub fn dtype(&self, name: &str) -> Option<String> {
        match self {
            Weights::Gguf(file) => file.dtype(name).map(|dtype| format!("{dtype:?}")),
            _ => self.file_of(name)?.dtype_name(name),
        }
    }

    /// The safetensors file that holds a tensor.
    pub(crate) fn file_of(&self, name: &str) -> Option<&TensorFile> {
        match self {
            Weights::Single(file) => file.contains(name).then_some(file),
            Weights::Sharded(files) => files.file_of(name),
            Weights::Gguf(_) => None,
        }
    }

    /// Reads elements `start..start + out.len()` of a flattened tensor, converted to f32 or dequantised.
    ///
    /// # Errors
    /// No such tensor, a range past its end, elements that are no floats, or a failed read.
    pub fn read_range_f32(&self, name: &str, start: usize, out: &mut [f32]) -> crate::Result<()> {
        match self {
            Weights::Single(file) => Ok(file.read_range_f32(name, start, out)?),
            Weights::Sharded(files) => match files.file_of(name) {
                Some(file) => Ok(file.read_range_f32(name, start, out)?),
                None => {
                    let (path, name) = (files.path().to_path_buf(), name.to_owned());
                    Err(TensorFileError::NoTensor { path, name }.into())
                }
            },
            Weights::Gguf(file) => Ok(file.read_range_f32(name, start, out)?),
        }
    }
}

/// Elements compared at a time.
const CHUNK: usize = 1 << 18;

impl Weights {
    /// Whether both tensors are there and are not the same, in shape or in any value as f32. Two NaNs are not the same, as for
    /// `transformers`.
    pub(super) fn differ(&self, one: &str, other: &str) -> crate::Result<bool> {
        let found = self.found();
        let floats =
            |name: &str| found.iter().find(|tensor| tensor.name == name && tensor.unreadable.is_none());
        let (Some(first), Some(second)) = (floats(one), floats(other)) else { return Ok(false) };
        if first.shape != second.shape {
            return Ok(true);
        }
        let elements: usize = first.shape.iter().product();
        let mut values = [vec![0.0; CHUNK.min(elements)], vec![0.0; CHUNK.min(elements)]];
        for start in (0..elements).step_by(CHUNK) {
            let len = CHUNK.min(elements - start);
            for (name, values) in [one, other].iter().zip(&mut values) {
                self.read_range_f32(name, start, &mut values[..len])?;
            }
            if values[0][..len] != values[1][..len] {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
