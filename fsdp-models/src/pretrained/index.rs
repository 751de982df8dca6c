//! Weights in several safetensors files, with an index of the file of each tensor.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use fsdp::files::{FoundTensor, TensorFile, brief, listed, said};
use serde::Deserialize;
use serde_json::Value;

use crate::error::PretrainedError;
use crate::settings::{Kind, Known, Table, read_object};

/// The index of a checkpoint of several files.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// Largest index, in bytes: 100 bytes for each of a million tensors.
const MAX_INDEX: u64 = 100_000_000;

/// An open checkpoint of several files. Threads may share it.
#[derive(Debug)]
pub struct ShardedTensorFiles {
    path: PathBuf,
    files: Vec<TensorFile>,
    /// Which file each tensor is in.
    places: BTreeMap<String, usize>,
}

#[derive(Deserialize)]
struct IndexJson {
    weight_map: BTreeMap<String, String>,
}

/// What an index may hold. Its metadata count bytes and parameters, which the files say themselves.
const TABLE: Table = Table {
    known: &[Known::Read(Kind::Texts, &["weight_map"]), Known::Ignored(&["metadata"])],
    off_is_unset: false,
};

impl ShardedTensorFiles {
    /// Opens an index, and all files that it names in its directory.
    ///
    /// # Errors
    /// The index or a file of it cannot be read or is damaged; the index names a file outside its directory; a tensor is
    /// not in the file that it should be in, or is in a file and not in the index: all of these are listed.
    pub fn open(path: &Path) -> crate::Result<Self> {
        let invalid = |reason: String| PretrainedError::Index { path: path.to_path_buf(), reason };
        let json = read_object(path, MAX_INDEX)?.map_err(|error| invalid(said(error)))?;
        TABLE.check(json.iter()).into_result(Some(path)).map_err(PretrainedError::from)?;
        // What is null is missing.
        let set = json.into_iter().filter(|(_, value)| !value.is_null()).collect();
        let index: Result<IndexJson, _> = serde_json::from_value(Value::Object(set));
        let index = index.map_err(|error| invalid(said(error)))?;
        let mut names: Vec<&String> = index.weight_map.values().collect();
        names.sort();
        names.dedup();
        if let Some(name) = names.iter().find(|name| !is_plain(name)) {
            return Err(invalid(format!(
                "{} is no name of a file in its directory",
                brief(&format!("{name:?}"))
            ))
            .into());
        }
        let dir = path.parent().unwrap_or(Path::new(""));
        let files =
            names.iter().map(|name| TensorFile::open(&dir.join(name))).collect::<Result<Vec<_>, _>>()?;
        let mut places = BTreeMap::new();
        let mut wrong = Vec::new();
        for (tensor, name) in &index.weight_map {
            let file = names.binary_search(&name).expect("every name is in the list of names");
            if !files[file].contains(tensor) {
                wrong.push(format!("{} is not in {}", brief(tensor), brief(name)));
            }
            places.insert(tensor.clone(), file);
        }
        for (index, (file, name)) in files.iter().zip(&names).enumerate() {
            let strays = file.names().filter(|tensor| places.get(*tensor) != Some(&index));
            wrong.extend(
                strays.map(|tensor| format!("{} of {} is not in the index", brief(tensor), brief(name))),
            );
        }
        if !wrong.is_empty() {
            return Err(invalid(listed(&wrong)).into());
        }
        Ok(ShardedTensorFiles { path: path.to_path_buf(), files, places })
    }

    /// The path of the index.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files, sorted by name.
    pub fn files(&self) -> &[TensorFile] {
        &self.files
    }

    /// The file that holds a tensor.
    pub fn file_of(&self, tensor: &str) -> Option<&TensorFile> {
        Some(&self.files[*self.places.get(tensor)?])
    }

    /// All tensors, to be held against a model's.
    pub fn found(&self) -> impl Iterator<Item = FoundTensor<'_>> {
        self.files.iter().flat_map(TensorFile::found)
    }
}

/// A name that leads nowhere but into the directory.
fn is_plain(name: &str) -> bool {
    let mut components = Path::new(name).components();
    // On every system, whatever its separators are: checkpoints travel.
    matches!(components.next(), Some(Component::Normal(only)) if only == name)
        && components.next().is_none()
        && !name.contains(['/', '\\', ':', '\0'])
}
