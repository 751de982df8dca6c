//! A directory of checkpoints, and how one comes to be in it: whole, or not at all.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::agree::Group;
use super::contents::{Contents, Prepared};
use super::disk::Disk;
use super::error::CheckpointError;
use super::index::{INDEX_FILE, Index, Section, StoredDtype, StoredTensor};
use super::write::{self, Manifest};
use crate::error::Result;
use crate::files::FileError;

/// A directory that holds the checkpoints of one run, each in a directory of its own: `step-00000100`, ...
///
/// A checkpoint is written beside its place and renamed when every rank's part is on the disk: what has the name is
/// complete, and a program that is killed at any moment leaves the earlier ones as they were. With several hosts, all
/// must see the same directory.
///
/// ```
/// use fsdp_runtime::checkpoint::{Checkpoints, Contents, Restore};
/// use fsdp_runtime::optim::AdamW;
/// use fsdp_runtime::{FullyShard, Param, launch};
///
/// # let dir = tempfile::tempdir()?;
/// # let dir = dir.path();
/// launch::local(2, |world| -> fsdp_runtime::Result<()> {
///     let model = Param::new(8).fully_shard(&world.data_parallel_mesh())?;
///     let optimizer = model.optimizer(AdamW::default())?;
///     let contents = Contents::of(&model).optimizer(&optimizer).value("samples", &0u64);
///     Checkpoints::new(dir).keep(3).save(contents)?;
///     Ok(())
/// })?;
/// // Later, on another number of ranks:
/// launch::local(3, |world| -> fsdp_runtime::Result<()> {
///     let mut model = Param::new(8).fully_shard(&world.data_parallel_mesh())?;
///     let mut optimizer = model.optimizer(AdamW::default())?;
///     let restore = Restore::new(&mut model).optimizer(&mut optimizer);
///     let restored = Checkpoints::new(dir).restore_latest(restore)?.expect("one was saved");
///     assert_eq!(restored.checkpoint.value::<u64>("samples")?, 0);
///     Ok(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Checkpoints {
    directory: PathBuf,
    keep: Option<usize>,
    disk: Disk,
}

/// A complete checkpoint in a [`Checkpoints`] directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// Optimizer steps taken.
    pub step: u64,
    /// Which one of this step: the latest has the highest.
    pub repeat: u64,
    /// Its directory.
    pub path: PathBuf,
}

/// Begins the names of what is being written or removed, and is no checkpoint.
const UNFINISHED: &str = ".unfinished-";
const LOCK_FILE: &str = ".lock";

impl Checkpoints {
    /// The checkpoints in `directory`, which the first save makes. All of them are kept.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Checkpoints { directory: directory.into(), keep: None, disk: Disk::default() }
    }

    /// Removes old checkpoints after each save, all but the last `count`, which must be at least 1.
    pub fn keep(mut self, count: usize) -> Self {
        self.keep = Some(count);
        self
    }

    /// Calls `hook(action, path)` before every file operation of a save: for tests of what happens if one fails or is
    /// the last.
    #[doc(hidden)]
    pub fn with_hook(
        mut self,
        hook: impl Fn(&'static str, &Path) -> io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.disk = Disk::with_hook(Arc::new(hook));
        self
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The complete checkpoints, oldest first; none if the directory does not exist. Local.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn list(&self) -> Result<Vec<Entry>> {
        Ok(self.entries()?)
    }

    fn entries(&self) -> Result<Vec<Entry>, CheckpointError> {
        let mut entries = Vec::new();
        for path in self.paths()? {
            let named = path.file_name().and_then(|name| name.to_str()).and_then(parse_name);
            if let Some((step, repeat)) = named
                && path.join(INDEX_FILE).is_file()
            {
                entries.push(Entry { step, repeat, path });
            }
        }
        entries.sort();
        Ok(entries)
    }

    /// Everything in the directory, sorted by name.
    fn paths(&self) -> Result<Vec<PathBuf>, CheckpointError> {
        let read = |error| FileError::on("read", &self.directory)(error);
        let listed = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            listed => listed.map_err(read)?,
        };
        let mut paths =
            listed.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>().map_err(read)?;
        paths.sort();
        Ok(paths)
    }

    /// What is no checkpoint yet or no longer, sorted by name: saves and removals that are under way, or were when their
    /// program was killed. The next save removes them. Local.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn unfinished(&self) -> Result<Vec<PathBuf>> {
        let paths = self.paths()?.into_iter();
        let unfinished = paths.filter(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(UNFINISHED))
        });
        Ok(unfinished.collect())
    }

    /// The latest complete checkpoint, if there is one. Local: ranks that load together call
    /// [`Checkpoints::restore_latest`].
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn latest(&self) -> Result<Option<PathBuf>> {
        Ok(self.entries()?.pop().map(|entry| entry.path))
    }

    /// Saves `contents` as a new checkpoint, and returns where it is. Each rank writes what it owns, at the same time as
    /// the others, without a gather; what several ranks have is written by one. When this returns the checkpoint is
    /// complete and on the disk; if it fails, on all ranks, the earlier ones are as they were.
    ///
    /// A second checkpoint of the same step replaces the first once it is complete.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// If the ranks' small state differs, if another program saves into the directory, if anything cannot be written.
    pub fn save(&self, contents: Contents<'_>) -> Result<PathBuf> {
        self.save_prepared(contents.prepare()?)
    }

    pub(super) fn save_prepared(&self, mut contents: Prepared) -> Result<PathBuf> {
        let group = &contents.group.clone();
        let wrong = contents.error.take().or_else(|| {
            (self.keep == Some(0))
                .then(|| CheckpointError::Usage("at least one checkpoint must be kept, not 0".into()))
        });
        // What is small is the same on all ranks, or a load would give some of them the state of others.
        let values = wrong.map_or_else(|| Ok(encode_values(&contents.values)), Err);
        let values = group.gather("what to save", values)?;
        agree_on_values(group, &values)?;

        let mut commit = None;
        let name = group.by_first("the place to save to", || -> Result<_, CheckpointError> {
            let begun = Commit::begin(self, group.step)?;
            let name = begun.unfinished_name().into_bytes();
            commit = Some(begun);
            Ok(name)
        })?;
        let directory = self.directory.join(String::from_utf8_lossy(&name).into_owned());

        let dtypes: HashMap<(&str, &str), StoredDtype> = contents
            .sections
            .iter()
            .flat_map(|(section, tensors)| {
                tensors.iter().map(move |tensor| ((section.as_str(), tensor.name.as_str()), tensor.dtype))
            })
            .collect();
        let file = format!("rank-{:05}.safetensors", group.comm.rank());
        let pieces = std::mem::take(&mut contents.pieces);
        let written = write::write(&self.disk, &directory, &file, pieces, |piece| {
            dtypes.get(&(piece.section.as_str(), piece.name.as_str())).copied().unwrap_or(StoredDtype::F32)
        });
        let manifest = written.and_then(|manifest| encode(&directory, &manifest));
        let manifests = group.gather("the state to save", manifest)?;

        let path = group.by_first("the index", || -> Result<_, CheckpointError> {
            let commit = commit.take().expect("the first rank has begun");
            let index = index(&directory, group.step, contents, &manifests)?;
            let path = commit.finish(&index)?;
            Ok(path.into_os_string().into_encoded_bytes())
        })?;
        // Every rank has the same name in its own view of the directory.
        let path = PathBuf::from(String::from_utf8_lossy(&path).into_owned());
        Ok(path.file_name().map_or_else(|| path.clone(), |name| self.directory.join(name)))
    }
}

fn encode_values(values: &BTreeMap<String, serde_json::Value>) -> Vec<u8> {
    let lines: Vec<String> = values.iter().map(|(name, value)| format!("`{name}` = {value}")).collect();
    lines.join("\n").into_bytes()
}

fn agree_on_values(group: &Group, values: &[Vec<u8>]) -> Result<()> {
    let rank = group.comm.rank();
    let Some(other) = values.iter().position(|theirs| *theirs != values[rank]) else { return Ok(()) };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (ours, theirs) = (text(&values[rank]), text(&values[other]));
    let differ = ours.lines().zip(theirs.lines()).find(|(ours, theirs)| ours != theirs);
    let (ours, theirs) = differ.map_or(("other values", "other values"), |(ours, theirs)| (ours, theirs));
    let (ours, theirs) = (format!("to save {ours}"), format!("to save {theirs}"));
    Err(crate::Error::RanksDiffer { rank, ours, other, theirs })
}

fn encode(directory: &Path, manifest: &Manifest) -> Result<Vec<u8>, CheckpointError> {
    serde_json::to_vec(manifest).map_err(|error| CheckpointError::Malformed {
        path: directory.to_path_buf(),
        reason: error.to_string(),
    })
}

/// The index of what all ranks have written.
fn index(
    directory: &Path,
    step: u64,
    contents: Prepared,
    manifests: &[Vec<u8>],
) -> Result<Index, CheckpointError> {
    let malformed = |reason: String| CheckpointError::Malformed { path: directory.to_path_buf(), reason };
    let mut index = Index::new(step, contents.seed, contents.writer);
    index.values = contents.values;
    for (section, tensors) in contents.sections {
        let tensors = tensors.into_iter().map(|tensor| {
            (tensor.name, StoredTensor { dtype: tensor.dtype, shape: tensor.shape, parts: Vec::new() })
        });
        index.tensors.insert(section, tensors.collect::<Section>());
    }
    for bytes in manifests {
        let manifest: Manifest =
            serde_json::from_slice(bytes).map_err(|error| malformed(error.to_string()))?;
        let Some(file) = manifest.file else { continue };
        for (section, name, mut part) in manifest.parts {
            part.file = index.files.len();
            let tensor = index.tensors.get_mut(&section).and_then(|tensors| tensors.get_mut(&name));
            let tensor =
                tensor.ok_or_else(|| malformed(format!("no tensor `{section}:{name}` is declared")))?;
            tensor.parts.push(part);
        }
        index.files.push(file);
    }
    for tensor in index.tensors.values_mut().flat_map(|section| section.values_mut()) {
        tensor.parts.sort_by_key(|part| part.start);
    }
    Ok(index)
}

/// The step and the repeat in a checkpoint's name.
fn parse_name(name: &str) -> Option<(u64, u64)> {
    let name = name.strip_prefix("step-")?;
    let (step, repeat) = name.split_once('-').unwrap_or((name, "0"));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?;
    Some((digits(step)?, digits(repeat)?))
}

/// A save that has begun, on the first rank.
struct Commit<'a> {
    store: &'a Checkpoints,
    /// Held until the save is over.
    _lock: File,
    step: u64,
    unfinished: PathBuf,
    finished: bool,
}

impl<'a> Commit<'a> {
    /// Keeps other programs out, removes what killed ones have left, and makes the directory to write to.
    fn begin(store: &'a Checkpoints, step: u64) -> Result<Self, CheckpointError> {
        let (disk, directory) = (&store.disk, &store.directory);
        disk.create_directory(directory)?;
        let lock_path = directory.join(LOCK_FILE);
        let lock = disk.run("open", &lock_path, || {
            File::options().write(true).create(true).truncate(false).open(&lock_path)
        })?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(CheckpointError::Busy { path: directory.clone() });
            }
            Err(TryLockError::Error(error)) => return Err(FileError::on("lock", &lock_path)(error).into()),
        }
        let read = |error| FileError::on("read", directory)(error);
        for entry in fs::read_dir(directory).map_err(read)? {
            let entry = entry.map_err(read)?;
            if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
                disk.remove_directory(&entry.path())?;
            }
        }
        let unfinished = directory.join(format!("{UNFINISHED}step-{step:08}"));
        disk.create_directory(&unfinished)?;
        Ok(Commit { store, _lock: lock, step, unfinished, finished: false })
    }

    fn unfinished_name(&self) -> String {
        self.unfinished.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Writes the index, puts the checkpoint in its place, and removes old ones.
    fn finish(mut self, index: &Index) -> Result<PathBuf, CheckpointError> {
        let (disk, directory) = (&self.store.disk, &self.store.directory);
        let index_path = self.unfinished.join(INDEX_FILE);
        let malformed = |reason| CheckpointError::Malformed { path: index_path.clone(), reason };
        let bytes = index.encode().map_err(malformed)?;
        // What cannot be read again is not saved.
        Index::decode(&index_path, &bytes)?;
        let mut file = disk.create(&index_path)?;
        disk.write(&index_path, &mut file, &bytes)?;
        disk.sync(&index_path, &file)?;
        disk.sync_directory(&self.unfinished)?;

        let earlier = self.store.entries()?;
        let repeats = earlier.iter().filter(|entry| entry.step == self.step).map(|entry| entry.repeat + 1);
        let path = directory.join(match repeats.max() {
            None => format!("step-{:08}", self.step),
            Some(repeat) => format!("step-{:08}-{repeat}", self.step),
        });
        disk.rename(&self.unfinished, &path)?;
        self.finished = true;
        disk.sync_directory(directory)?;

        let replaced = |entry: &&Entry| entry.step == self.step;
        let mut old: Vec<&Entry> = earlier.iter().filter(replaced).collect();
        if let Some(keep) = self.store.keep {
            let others: Vec<&Entry> = earlier.iter().filter(|entry| !replaced(entry)).collect();
            let surplus = (others.len() + 1).saturating_sub(keep);
            old.extend(others.into_iter().take(surplus));
        }
        for entry in old {
            // It goes at once, however long its files take.
            let name = entry.path.file_name().unwrap_or_default().to_string_lossy();
            let going = directory.join(format!("{UNFINISHED}removed-{name}"));
            disk.run("remove", &entry.path, || fs::rename(&entry.path, &going))?;
            disk.remove_directory(&going)?;
        }
        Ok(path)
    }
}

impl Drop for Commit<'_> {
    fn drop(&mut self) {
        if !self.finished {
            // The error that led here says more than that of removing what is of no use to anyone.
            let _ = fs::remove_dir_all(&self.unfinished);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_steps_and_repeats() {
        assert_eq!(parse_name("step-00000100"), Some((100, 0)));
        assert_eq!(parse_name("step-00000100-2"), Some((100, 2)));
        for other in ["step-", "step-1x", "step-+1", "step-1-", ".saving-step-00000001", "steps-1", "1"] {
            assert_eq!(parse_name(other), None, "{other}");
        }
    }
}
