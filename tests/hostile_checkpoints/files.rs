//! The files of a checkpoint, in memory and changed in many ways.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

pub const INDEX: &str = "index.json";

/// By name.
pub type Files = BTreeMap<String, Vec<u8>>;

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % limit.max(1) as u64) as usize
    }

    pub fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }
}

/// A changed checkpoint.
pub struct Mutant {
    pub label: String,
    pub files: Files,
    pub fate: Fate,
}

/// What must come of it. In any case nothing panics, memory is in proportion, errors name the place, and a strict restore
/// gives the values that were saved or fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Bytes are not those that were written: all that differ are found.
    Damaged,
    /// The index is another one, with a true checksum: it is refused, with these words.
    Refused(&'static str),
    /// The same, but it can be opened: to restore it strictly is refused, with these words.
    Unfit(&'static str),
    /// The same, but it is as good as the one that was saved.
    Sound,
    /// The same; it can be read or not.
    Forged,
}

pub fn read(dir: &Path) -> Files {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())).collect()
}

/// Makes a directory of these files, in place of what is there.
pub fn write(dir: &Path, files: &Files) {
    if dir.exists() {
        fs::remove_dir_all(dir).unwrap();
    }
    fs::create_dir_all(dir).unwrap();
    for (name, bytes) in files {
        fs::write(dir.join(name), bytes).unwrap();
    }
}

/// The paths of all files and directories below `dir`.
pub fn tree(dir: &Path) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            paths.extend(tree(&path));
        }
        paths.push(path);
    }
    paths.sort();
    paths
}

/// The index without its checksum.
pub fn index(files: &Files) -> Value {
    let mut index: Value = serde_json::from_slice(&files[INDEX]).unwrap();
    index.as_object_mut().unwrap().remove("crc32").unwrap();
    index
}

/// JSON text, an object, with its checksum as the last entry.
pub fn with_checksum(text: &str) -> Vec<u8> {
    let body = text.trim_end().strip_suffix('}').unwrap().trim_end();
    format!("{body},\n  \"crc32\": \"{:08x}\"\n}}\n", crc32fast::hash(body.as_bytes())).into_bytes()
}

/// An index with its checksum.
pub fn encode(index: &Value) -> Vec<u8> {
    with_checksum(&serde_json::to_string_pretty(index).unwrap())
}
