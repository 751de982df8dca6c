//! Writes a Hugging Face directory, tensor by tensor.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use fsdp::files::{AtomicFile, FileError, StoredDtype, TensorFileError, TensorFileWriter};
use half::{bf16, f16};
use serde_json::{Map, Value, json};

use super::index::INDEX;
use super::weights::SINGLE;
use crate::error::PretrainedError;
use crate::generation::write_json;
use crate::paths::check_model_dir;

const CONFIG: &str = "config.json";

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Its name in the file.
    pub name: String,
    /// Its dims, outermost first.
    pub shape: Vec<usize>,
    /// What its values are rounded to.
    pub dtype: StoredDtype,
}

impl StoredTensor {
    pub(crate) fn bytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.dtype.size() as u64
    }
}

/// Writes a directory that `transformers` loads: all tensors are declared first, then filled in any order.
///
/// Every file appears whole or not at all. Of several files the index comes last: a directory that was to be overwritten and
/// is not yet complete has none, hence no weights, rather than some of the old and some of the new.
#[derive(Debug)]
pub struct PretrainedWriter {
    dir: PathBuf,
    files: Vec<(String, TensorFileWriter)>,
    /// File and dtype of each tensor.
    places: BTreeMap<String, (usize, StoredDtype)>,
    config: AtomicFile,
    /// Where there are several files.
    index: Option<AtomicFile>,
    bytes: u64,
}

impl PretrainedWriter {
    /// Makes the directory if there is none, and opens all files beside their places: a single one if all tensors together
    /// have at most `max_shard_bytes`, else as many as it takes, cut between tensors. A larger tensor has a file of its own.
    ///
    /// # Errors
    /// The place is not writable, is in a checkpoint or where a run has its checkpoints; or a name comes twice.
    pub fn create(dir: &Path, tensors: &[StoredTensor], max_shard_bytes: u64) -> crate::Result<Self> {
        check_model_dir(dir)?;
        fs::create_dir_all(dir).map_err(FileError::on("write", dir))?;
        let mut shards: Vec<Vec<&StoredTensor>> = vec![Vec::new()];
        let mut filled = 0u64;
        for tensor in tensors {
            let current = shards.last_mut().expect("there is a first one");
            if !current.is_empty() && filled.saturating_add(tensor.bytes()) > max_shard_bytes {
                filled = 0;
                shards.push(vec![tensor]);
            } else {
                current.push(tensor);
            }
            filled = filled.saturating_add(tensor.bytes());
        }
        let several = shards.len() > 1;
        let mut files = Vec::new();
        let mut places = BTreeMap::new();
        for (at, tensors) in shards.iter().enumerate() {
            let name = if several { shard_name(at + 1, shards.len()) } else { SINGLE.to_owned() };
            let path = dir.join(&name);
            let declared =
                tensors.iter().map(|tensor| (tensor.name.as_str(), &tensor.shape[..], tensor.dtype));
            files.push((name, TensorFileWriter::create_mixed(&path, declared)?));
            for tensor in tensors {
                if places.insert(tensor.name.clone(), (at, tensor.dtype)).is_some() {
                    return Err(TensorFileError::Duplicate { path, name: tensor.name.clone() }.into());
                }
            }
        }
        let index = several.then(|| AtomicFile::create(&dir.join(INDEX))).transpose()?;
        let config = AtomicFile::create(&dir.join(CONFIG))?;
        let bytes = tensors.iter().map(StoredTensor::bytes).sum();
        Ok(PretrainedWriter { dir: dir.to_path_buf(), files, places, config, index, bytes })
    }

    /// Writes elements `start..start + values.len()` of a flattened tensor, rounded to nearest even. Each element is to be
    /// written once.
    ///
    /// # Errors
    /// No such tensor, a range past its end, a finite value that would become infinite, or a failed write.
    pub fn write_range_f32(&mut self, name: &str, start: usize, values: &[f32]) -> crate::Result<()> {
        let (file, dtype) = self.place(name)?;
        let overflows = |value: f32| match dtype {
            StoredDtype::BF16 => bf16::from_f32(value).is_infinite() && value.is_finite(),
            StoredDtype::F16 => f16::from_f32(value).is_infinite() && value.is_finite(),
            _ => false,
        };
        if let Some(at) = values.iter().position(|&value| overflows(value)) {
            let (name, element, value) = (name.to_owned(), start + at, values[at]);
            return Err(PretrainedError::Overflow { name, element, value, dtype }.into());
        }
        Ok(self.files[file].1.write_range_f32(name, start, values)?)
    }

    /// Writes elements of a flattened tensor from `start` on as they are, little-endian and in its dtype. Each element is to
    /// be written once.
    ///
    /// # Errors
    /// No such tensor, a range past its end, or a failed write.
    pub fn write_range_bytes(&mut self, name: &str, start: usize, bytes: &[u8]) -> crate::Result<()> {
        let (file, _) = self.place(name)?;
        Ok(self.files[file].1.write_range_bytes(name, start, bytes)?)
    }

    fn place(&self, name: &str) -> Result<(usize, StoredDtype), TensorFileError> {
        let place = self.places.get(name).copied();
        place.ok_or_else(|| TensorFileError::NoTensor { path: self.dir.clone(), name: name.to_owned() })
    }

    /// Puts all files in their places, `config` as `config.json` if there is one, and removes weights of an older checkpoint
    /// that are no part of this one.
    ///
    /// # Errors
    /// A tensor is not completely written: nothing is changed then. Writing to the disk failed.
    pub fn finish(self, config: Option<&Map<String, Value>>) -> crate::Result<()> {
        let PretrainedWriter { dir, files, places, config: mut config_file, index, bytes } = self;
        files.iter().try_for_each(|(_, file)| file.check_complete())?;
        if let Some(config) = config {
            write_json(&mut config_file, &Value::Object(config.clone()))?;
        }
        let names: Vec<String> = files.iter().map(|(name, _)| name.clone()).collect();
        let outdated: &[&str] = if index.is_some() { &[INDEX, SINGLE] } else { &[] };
        outdated.iter().try_for_each(|name| remove(&dir.join(name)))?;
        files.into_iter().try_for_each(|(_, file)| file.finish())?;
        if config.is_some() {
            config_file.commit()?;
        }
        match index {
            Some(mut index) => {
                let map: Map<String, Value> =
                    places.into_iter().map(|(name, (file, _))| (name, json!(names[file]))).collect();
                write_json(&mut index, &json!({"metadata": {"total_size": bytes}, "weight_map": map}))?;
                index.commit()?;
            }
            None => remove(&dir.join(INDEX))?,
        }
        for entry in fs::read_dir(&dir).map_err(FileError::on("read", &dir))? {
            let entry = entry.map_err(FileError::on("read", &dir))?;
            let name = entry.file_name();
            if name.to_str().is_some_and(|name| is_shard(name) && !names.iter().any(|known| known == name)) {
                remove(&entry.path())?;
            }
        }
        Ok(())
    }
}

fn remove(path: &Path) -> Result<(), FileError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(FileError::on("remove", path)(error)),
        _ => Ok(()),
    }
}

fn shard_name(number: usize, of: usize) -> String {
    format!("model-{number:05}-of-{of:05}.safetensors")
}

/// Whether a file has the name that [`shard_name`] gives.
fn is_shard(name: &str) -> bool {
    let numbers = name.strip_prefix("model-").and_then(|rest| rest.strip_suffix(".safetensors"));
    let Some((number, of)) = numbers.and_then(|numbers| numbers.split_once("-of-")) else {
        return false;
    };
    [number, of].iter().all(|digits| digits.len() >= 5 && digits.bytes().all(|byte| byte.is_ascii_digit()))
}
