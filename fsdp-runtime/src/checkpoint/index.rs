//! The index of a checkpoint: for every tensor its dtype, its shape, and where its elements are.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::description::ModelDescription;
use crate::error::CheckpointError;
pub use crate::files::StoredDtype;
use crate::files::{brief, said};

/// Version of the format that this program writes, the latest that it reads. Version 1 has no description of the model.
pub const FORMAT_VERSION: u64 = 2;

/// Name of the index in a checkpoint's directory.
pub const INDEX_FILE: &str = "index.json";

/// Most steps that are believed: one can always be added.
pub(super) const MAX_STEPS: u64 = i64::MAX as u64;

/// Most bytes of the name of a section or tensor: what is made of many names stays in proportion to the index.
const MAX_NAME: usize = 1024;

/// Bytes under one checksum.
pub(super) const BLOCK: usize = 1 << 20;

const FORMAT: &str = "fsdp-checkpoint";

/// The tensors of one section, by name.
pub type Section = BTreeMap<String, StoredTensor>;

/// What `index.json` holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Index {
    pub(super) format: String,
    pub(super) version: u64,
    /// Optimizer steps taken.
    pub step: u64,
    /// Seed of initial weights and random streams.
    pub seed: u64,
    /// The run that wrote it; for information only.
    pub written_by: Writer,
    /// What the model is beyond its tensors; none in a checkpoint of version 1, which is restored by its tensors alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelDescription>,
    /// The files that hold the tensors.
    pub files: Vec<StoredFile>,
    /// Small state, by name: of the optimizer, and what the program has added.
    pub values: BTreeMap<String, serde_json::Value>,
    /// The tensors, by section (`model`, `optimizer.exp_avg`, ..) and name.
    pub tensors: BTreeMap<String, Section>,
    #[serde(default, skip_serializing)]
    crc32: Checked,
}

/// The checksum, once it has been compared.
#[derive(Clone, Debug, Default, PartialEq)]
struct Checked;

impl<'de> Deserialize<'de> for Checked {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        serde::de::IgnoredAny::deserialize(deserializer).map(|_| Checked)
    }
}

/// Who wrote a checkpoint. Loading does not depend on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Writer {
    /// Number of ranks.
    pub ranks: usize,
    /// The mesh, as `dp_outer 2 x dp_shard 4`.
    pub mesh: String,
    /// What was sharded.
    pub strategy: String,
    /// Dtypes.
    pub precision: String,
    /// Where shard boundaries could fall.
    pub alignment: String,
    /// Version of this library.
    pub library: String,
}

/// A file of a checkpoint: safetensors, in which a tensor `section:name` is this rank's part, flattened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredFile {
    /// Name in the checkpoint's directory.
    pub name: String,
    /// Length.
    pub bytes: u64,
    /// CRC-32 of what comes before the tensors.
    pub header_crc32: u32,
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredTensor {
    /// Element type.
    pub dtype: StoredDtype,
    /// Dims, outermost first.
    pub shape: Vec<usize>,
    /// Its elements, in order and without gap.
    pub parts: Vec<StoredPart>,
}

/// Consecutive elements of a flattened tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredPart {
    /// First element in the flattened tensor.
    pub start: usize,
    /// Number of elements.
    pub len: usize,
    /// Index of the file.
    pub file: usize,
    /// First byte in the file.
    pub offset: u64,
    /// CRC-32 of each MiB, the last one shorter.
    pub crc32: Vec<u32>,
}

impl StoredTensor {
    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of all elements.
    pub fn bytes(&self) -> usize {
        self.numel() * self.dtype.size()
    }
}

/// First byte, the one behind the last, and of which tensor.
type Place<'a> = (u64, u64, Named<'a>);

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Named<'a>(&'a str, &'a str);

impl std::fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.0, self.1)
    }
}

/// Before the checksum, the last entry of the file.
const CHECKSUM: &str = ",\n  \"crc32\": \"";

impl Index {
    pub(super) fn new(step: u64, seed: u64, written_by: Writer, model: ModelDescription) -> Self {
        Index {
            format: FORMAT.into(),
            version: FORMAT_VERSION,
            step,
            seed,
            written_by,
            model: Some(model),
            files: Vec::new(),
            values: BTreeMap::new(),
            tensors: BTreeMap::new(),
            crc32: Checked,
        }
    }

    /// Version of the format it was written in.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().fold(0, |bytes, file| bytes.saturating_add(file.bytes))
    }

    /// The file: readable JSON whose last entry is the checksum of all before it.
    pub(super) fn encode(&self) -> Result<Vec<u8>, String> {
        let mut text = serde_json::to_string_pretty(self).map_err(|error| error.to_string())?;
        let body = text.strip_suffix("\n}").map(str::len).ok_or("it is no object")?;
        text.truncate(body);
        let checksum = crc32fast::hash(text.as_bytes());
        text.push_str(&format!("{CHECKSUM}{checksum:08x}\"\n}}\n"));
        Ok(text.into_bytes())
    }

    /// Reads and checks an index that was found at `path`.
    pub(super) fn decode(path: &Path, bytes: &[u8]) -> Result<Self, CheckpointError> {
        let malformed = |reason: String| CheckpointError::Malformed { path: path.to_path_buf(), reason };
        let text = std::str::from_utf8(bytes).map_err(|error| malformed(error.to_string()))?;
        let not_read = |error: serde_json::Error| malformed(said(error));

        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u64,
        }
        let head: Head = serde_json::from_str(text).map_err(not_read)?;
        if head.format != FORMAT {
            let found = brief(&head.format);
            return Err(malformed(format!("its format is `{found}`, expected `{FORMAT}`")));
        }
        if head.version > FORMAT_VERSION {
            let (found, supported) = (head.version, FORMAT_VERSION);
            return Err(CheckpointError::Version { path: path.to_path_buf(), found, supported });
        }
        let body = text.rfind(CHECKSUM).map(|at| (&text[..at], &text[at + CHECKSUM.len()..]));
        let (body, rest) = body.ok_or_else(|| malformed("it has no checksum".into()))?;
        let written = rest.strip_suffix("\"\n}\n").and_then(|digits| u32::from_str_radix(digits, 16).ok());
        let found = crc32fast::hash(body.as_bytes());
        if written != Some(found) {
            return Err(malformed(format!(
                "its checksum is {found:08x}, which is not the one written in it"
            )));
        }
        let index: Index = serde_json::from_str(text).map_err(not_read)?;
        index.check().map_err(malformed)?;
        Ok(index)
    }

    /// Checks that the parts of every tensor tile it, and that those in a file tile it too, behind its header: every
    /// byte is under a checksum.
    fn check(&self) -> Result<(), String> {
        if self.step > MAX_STEPS {
            return Err(format!("step {} is more than {MAX_STEPS}", self.step));
        }
        self.check_model()?;
        let mut names = std::collections::HashSet::new();
        for StoredFile { name, .. } in &self.files {
            let leads = |c: char| matches!(c, '/' | '\\' | ':') || c.is_control();
            let plain = !name.is_empty() && !name.starts_with('.') && !name.contains(leads);
            if !plain {
                return Err(format!("file {name:?} is not a plain name in the directory of the checkpoint"));
            }
            if !names.insert(name) {
                return Err(format!("file `{name}` is listed twice"));
            }
        }
        // Of each file, the places that parts take.
        let mut places: Vec<Vec<Place<'_>>> = vec![Vec::new(); self.files.len()];
        for (section, tensors) in &self.tensors {
            check_name("section", section)?;
            for (name, tensor) in tensors {
                check_name("tensor", name)?;
                let wrong = |what: String| format!("tensor `{section}:{name}` {what}");
                let numel = tensor.shape.iter().try_fold(1usize, |numel, &dim| numel.checked_mul(dim));
                let bytes = numel.and_then(|numel| numel.checked_mul(tensor.dtype.size()));
                let (Some(numel), Some(_)) = (numel, bytes) else {
                    return Err(wrong(format!("of shape {:?} is too large", tensor.shape)));
                };
                let mut next = 0;
                for part in &tensor.parts {
                    let end = part.start.checked_add(part.len).filter(|end| *end <= numel);
                    let (true, Some(end)) = (part.start == next && part.len > 0, end) else {
                        let (start, len) = (part.start, part.len);
                        return Err(wrong(format!(
                            "has a part of {len} elements from {start}, expected one from {next} within {numel}"
                        )));
                    };
                    next = end;
                    let Some(file) = self.files.get(part.file) else {
                        return Err(wrong(format!(
                            "is in file {}, but there are {}",
                            part.file,
                            self.files.len()
                        )));
                    };
                    let bytes = (part.len * tensor.dtype.size()) as u64;
                    let end = part.offset.checked_add(bytes).filter(|end| *end <= file.bytes);
                    let Some(end) = end else {
                        return Err(wrong(format!(
                            "is at bytes {}.. of `{}`, {bytes} of them, but the file has {}",
                            part.offset, file.name, file.bytes
                        )));
                    };
                    let blocks = bytes.div_ceil(BLOCK as u64);
                    if part.crc32.len() as u64 != blocks {
                        let have = part.crc32.len();
                        return Err(wrong(format!("has {have} checksums for a part of {blocks} blocks")));
                    }
                    places[part.file].push((part.offset, end, Named(section, name)));
                }
                if next != numel {
                    return Err(wrong(format!("has parts for {next} of its {numel} elements")));
                }
            }
        }
        for (file, places) in self.files.iter().zip(&mut places) {
            places.sort_unstable();
            for pair in places.windows(2) {
                if pair[0].1 > pair[1].0 {
                    let (one, other) = (&pair[0].2, &pair[1].2);
                    return Err(format!("tensors `{one}` and `{other}` share bytes of `{}`", file.name));
                }
            }
            if places.is_empty() {
                return Err(format!("no tensor is in file `{}`", file.name));
            }
            let ends = places.iter().map(|place| place.1);
            let starts = places.iter().skip(1).map(|place| place.0).chain([file.bytes]);
            if let Some((end, start)) = ends.zip(starts).find(|(end, start)| end != start) {
                return Err(format!("bytes {end}..{start} of `{}` belong to no tensor", file.name));
            }
        }
        Ok(())
    }
}

/// The first version that has a description of the model.
const DESCRIBED: u64 = 2;

impl Index {
    /// Checks the description of the model.
    fn check_model(&self) -> Result<(), String> {
        let version = self.version;
        let model = match &self.model {
            Some(model) if version >= DESCRIBED => model,
            None if version < DESCRIBED => return Ok(()),
            Some(_) => return Err(format!("it describes its model, which version {version} does not")),
            None => return Err(format!("it does not describe its model, which version {version} does")),
        };
        for (path, variant) in &model.variants {
            check_name("enum", path)?;
            check_name("variant", variant)?;
        }
        let tensors = self.tensors.get(super::MODEL);
        for (name, target) in &model.ties {
            check_name("tensor", name)?;
            check_name("tensor", target)?;
            if model.ties.contains_key(target) || tensors.is_some_and(|tensors| tensors.contains_key(name)) {
                let (name, target) = (brief(name), brief(target));
                return Err(format!("`{name}` is tied to `{target}`, but one of them is saved as another"));
            }
        }
        model.buffers.iter().try_for_each(|name| check_name("tensor", name))
    }
}

fn check_name(what: &str, name: &str) -> Result<(), String> {
    if name.len() > MAX_NAME {
        let start: String = name.chars().take(32).collect();
        let len = name.len();
        return Err(format!("the name of {what} {start:?}.. has {len} bytes, more than {MAX_NAME}"));
    }
    if name.contains(char::is_control) {
        return Err(format!("the name of {what} {name:?} has control characters"));
    }
    Ok(())
}
