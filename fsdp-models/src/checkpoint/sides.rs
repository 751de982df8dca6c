//! The two sides of a comparison: checkpoints or pretrained weights.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;

use fsdp::checkpoint::{Checkpoint, INDEX_FILE, MODEL, StoredDtype};

use super::elements::Elements;
use super::facts::ranks_text;
use super::find;
use crate::Error;
use crate::pretrained::Weights;
use crate::trainer::quantity;

/// One of two that are compared.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a program has two of them")]
pub enum Side {
    /// A checkpoint.
    Checkpoint(Checkpoint),
    /// A directory of Hugging Face's, a safetensors file or a GGUF file. Its tensors stand for those of any section.
    Weights(Weights),
}

impl fmt::Display for Side {
    /// Where it is and what it is.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path().display();
        match self {
            Side::Checkpoint(checkpoint) => {
                let (step, ranks) = (checkpoint.step(), checkpoint.index().written_by.ranks);
                write!(f, "{path}, step {}, written by {}", quantity::count(step), ranks_text(ranks))
            }
            Side::Weights(_) => write!(f, "{path}, pretrained weights"),
        }
    }
}

/// What a side says of a tensor.
#[derive(Clone, Debug)]
pub(super) struct Described {
    pub dtype: String,
    pub shape: Vec<usize>,
    /// The section that it is in.
    pub section: String,
    /// Its values can be read.
    pub readable: bool,
}

impl Side {
    /// Opens what is at `path`: a checkpoint, the latest one of a directory of checkpoints, or what [`Weights::open`] reads.
    ///
    /// # Errors
    /// If it is none of these, or damaged.
    pub fn open(path: &Path) -> crate::Result<Side> {
        let found = find(path)?;
        if !found.join(INDEX_FILE).exists() && Weights::are_at(path) {
            return Ok(Side::Weights(Weights::open(path)?));
        }
        Ok(Side::Checkpoint(Checkpoint::open(found)?))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        match self {
            Side::Checkpoint(checkpoint) => checkpoint.path(),
            Side::Weights(weights) => weights.path(),
        }
    }

    /// Fails if it has no such section.
    pub(super) fn check_section(&self, section: &str) -> crate::Result<()> {
        match self {
            Side::Checkpoint(checkpoint) => Ok(checkpoint.section(section).map(drop)?),
            Side::Weights(_) => Ok(()),
        }
    }

    /// The tensors of a section, none if there is no such section; `as_exported`, with the weights that an average has none of.
    pub(super) fn tensors(&self, section: &str, as_exported: bool) -> BTreeMap<String, Described> {
        match self {
            Side::Checkpoint(checkpoint) => {
                let stored = &checkpoint.index().tensors;
                let of = |section: &str| {
                    let tensors = stored.get(section).into_iter().flatten();
                    let section = section.to_owned();
                    tensors.map(move |(name, tensor)| {
                        let (dtype, shape) = (tensor.dtype.to_string(), tensor.shape.clone());
                        (name.clone(), Described { dtype, shape, section: section.clone(), readable: true })
                    })
                };
                let weights = as_exported.then(|| of(MODEL)).into_iter().flatten();
                weights.chain(of(section)).collect()
            }
            Side::Weights(weights) => {
                let described = weights.found().into_iter().map(|found| {
                    let dtype = weights.dtype(found.name).unwrap_or_default();
                    let file = weights.file_of(found.name);
                    let readable = file.is_none_or(|file| file.dtype(found.name).is_some());
                    let (shape, section) = (found.shape.to_vec(), section.to_owned());
                    (found.name.to_owned(), Described { dtype, shape, section, readable })
                });
                described.collect()
            }
        }
    }

    /// Reads elements of a tensor; those of GGUF files as f32.
    pub(super) fn read(&self, section: &str, name: &str, range: Range<usize>) -> crate::Result<Elements> {
        match self {
            Side::Checkpoint(checkpoint) => {
                let dtype = checkpoint.tensor(section, name)?.dtype;
                Ok(Elements { dtype, bytes: checkpoint.read_bytes(section, name, range)? })
            }
            Side::Weights(weights) => {
                let file = weights.file_of(name);
                if let Some((file, dtype)) = file.and_then(|file| Some((file, file.dtype(name)?))) {
                    let bytes = file.read_range_bytes(name, range.start, range.len()).map_err(Error::from)?;
                    return Ok(Elements { dtype, bytes });
                }
                let mut values = vec![0f32; range.len()];
                weights.read_range_f32(name, range.start, &mut values)?;
                let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                Ok(Elements { dtype: StoredDtype::F32, bytes })
            }
        }
    }
}
