//! A directory of checkpoints. A checkpoint appears in it whole, or not at all.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::agree::caught;
use super::commit::{Commit, UNFINISHED, is_ours, parse_name};
use super::contents::{Contents, Piece, Prepared};
use super::disk::Disk;
use super::index::{Index, Section, StoredDtype, StoredTensor};
use super::write::{self, Manifest};
use crate::error::{CheckpointError, Result};
use crate::files::FileError;

/// A directory that holds the checkpoints of one run, each in a directory of its own: `step-00000100`, ...
///
/// A checkpoint is written beside its place and renamed when every rank's part is on the disk: what has the name is
/// complete, and a program that is killed at any moment leaves the earlier ones as they were. The next save removes what
/// it was writing, which has a name that begins with `.unfinished-`. With several hosts, all must see the same
/// directory. Files and directories of other names are left alone. A disk may be slow: its work is under no time-out.
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
#[must_use]
pub struct Checkpoints {
    pub(super) directory: PathBuf,
    pub(super) keep: Option<usize>,
    pub(super) disk: Disk,
}

/// A checkpoint in a [`Checkpoints`] directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// Optimizer steps taken.
    pub step: u64,
    /// Which one of this step: the latest has the highest.
    pub repeat: u64,
    /// Its directory.
    pub path: PathBuf,
}

impl Checkpoints {
    /// The checkpoints in `directory`, which the first save makes. All of them are kept.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Checkpoints { directory: directory.into(), keep: None, disk: Disk::default() }
    }

    /// Removes old checkpoints after each save, all but the last `count`, which must be at least 1. If that fails, the
    /// save returns [`CheckpointError::NotRemoved`] with the place of the new checkpoint, which is complete, and the next
    /// save tries again.
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

    /// Whether saves use files or directories of this name in the directory: nothing else may have it there.
    pub fn uses_name(name: &OsStr) -> bool {
        name.to_str().is_some_and(is_ours)
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The checkpoints, oldest first; none if the directory does not exist. One that was damaged after its save is among
    /// them, even without its index: to open it tells so. Local.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn list(&self) -> Result<Vec<Entry>> {
        Ok(self.entries()?)
    }

    pub(super) fn entries(&self) -> Result<Vec<Entry>, CheckpointError> {
        let mut entries = Vec::new();
        for path in self.paths()? {
            let named = path.file_name().and_then(|name| name.to_str()).and_then(parse_name);
            let Some((step, repeat)) = named else { continue };
            // One without an index, or that cannot be looked at, is not passed over: training would go on from an
            // earlier one.
            match fs::symlink_metadata(&path) {
                // It was removed since.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                found => {
                    found.map_err(FileError::on("read", &path))?;
                    entries.push(Entry { step, repeat, path });
                }
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

    /// The latest checkpoint, if there is one, damaged or not: to open it tells so. Local: ranks that load together call
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
    /// The first save makes the directory that of the model's run: until the model and its saves are gone, no other model
    /// can save there, in this program or another one (file systems without locks do not keep them out).
    ///
    /// A second checkpoint of the same step replaces the first once it is complete. One of an earlier step than the
    /// latest is refused, as it would not be the one to go on from: a run that goes back saves into another directory, or
    /// its user removes what it has given up.
    ///
    /// Every rank must call it. It waits for saves of the model that are under way in the background.
    ///
    /// # Errors
    /// If the ranks' small state differs, if the directory is that of another run ([`CheckpointError::Busy`]), if it has a later checkpoint, if
    /// anything cannot be written; if an old checkpoint cannot be removed ([`CheckpointError::NotRemoved`]: the new one
    /// is complete). The same on all ranks, and training can go on.
    pub fn save(&self, contents: Contents<'_>) -> Result<PathBuf> {
        let prepared = contents.prepare()?;
        let turn = prepared.group.turn();
        turn.wait();
        self.save_prepared(prepared)
    }

    pub(super) fn save_prepared(&self, mut contents: Prepared) -> Result<PathBuf> {
        let group = &contents.group.clone();
        let wrong = contents.error.take().or_else(|| {
            (self.keep == Some(0))
                .then(|| CheckpointError::Usage("at least one checkpoint must be kept, not 0".into()))
        });
        // What is small is the same on all ranks, or a load would give some of them the state of others.
        group.meet("a save")?;
        group.agree("to save", wrong.map_or_else(|| Ok(parts(&contents)), Err))?;

        let mut commit = None;
        let name = group.by_first("the place to save to", || -> Result<_, CheckpointError> {
            let begun = Commit::begin(self, &group.locks, group.step)?;
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
        let manifest = caught(|| {
            let dtype = |piece: &Piece| {
                dtypes
                    .get(&(piece.section.as_str(), piece.name.as_str()))
                    .copied()
                    .unwrap_or(StoredDtype::F32)
            };
            encode(&directory, &write::write(&self.disk, &directory, &file, pieces, dtype)?)
        });
        let manifests = group.gather("the state to save", manifest)?;

        let mut complete = None;
        let name = group.by_first("the index", || -> Result<_, CheckpointError> {
            let commit = commit.take().expect("the first rank has begun");
            let index = index(&directory, group.step, contents, &manifests)?;
            Ok(complete.insert(commit.complete(&index)?).name().to_owned().into_bytes())
        })?;
        // In this rank's own view of the directory.
        let path = self.directory.join(String::from_utf8_lossy(&name).into_owned());
        let left = group.by_first("the old checkpoints", || -> Result<_, CheckpointError> {
            let complete = complete.take().expect("the first rank has completed it");
            Ok(complete.remove_old().map_or_else(|error| error.to_string().into_bytes(), |()| Vec::new()))
        })?;
        if !left.is_empty() {
            let message = String::from_utf8_lossy(&left).into_owned();
            return Err(CheckpointError::NotRemoved { path, message }.into());
        }
        Ok(path)
    }
}

/// What a rank is to save, in words.
fn parts(contents: &Prepared) -> BTreeMap<String, String> {
    let values = contents.values.iter().map(|(name, value)| {
        let name = format!("`{name}`");
        (name.clone(), format!("{name} = {value}"))
    });
    let sections = contents.sections.iter().map(|(name, tensors)| {
        let name = format!("section `{name}`");
        (name.clone(), format!("{name} of {} tensors", tensors.len()))
    });
    values.chain(sections).collect()
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
    let mut index = Index::new(step, contents.seed, contents.writer, contents.model);
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
