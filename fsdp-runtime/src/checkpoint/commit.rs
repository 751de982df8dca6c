//! Puts a complete checkpoint in its place, on the first rank.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::disk::Disk;
use super::index::{INDEX_FILE, Index};
use super::store::{Checkpoints, Entry};
use crate::error::CheckpointError;
use crate::files::{FileError, FileLock, FileLocks};

/// Begins the names of what is being written or removed, and is no checkpoint.
pub(super) const UNFINISHED: &str = ".unfinished-";
const LOCK_FILE: &str = ".lock";

fn name(step: u64, repeat: u64) -> String {
    if repeat == 0 { format!("step-{step:08}") } else { format!("step-{step:08}-{repeat}") }
}

/// A name that no other save gives: a rank that is late to know of the failure of its save writes into no other's
/// directory.
fn unfinished_name(what: &str) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    format!("{UNFINISHED}{what}-{:x}", now.as_nanos())
}

/// The step and the repeat in a checkpoint's name; none in a name that no save gives.
pub(super) fn parse_name(found: &str) -> Option<(u64, u64)> {
    let numbers = found.strip_prefix("step-")?;
    let (step, repeat) = numbers.split_once('-').unwrap_or((numbers, "0"));
    let (step, repeat) = (step.parse().ok()?, repeat.parse().ok()?);
    // One more repeat can always be counted.
    (repeat < u64::MAX && name(step, repeat) == found).then_some((step, repeat))
}

/// Whether a directory of checkpoints may have it as its own.
pub(super) fn is_ours(found: &str) -> bool {
    found == LOCK_FILE || found.starts_with(UNFINISHED) || parse_name(found).is_some()
}

/// Whether a save or a removal that was cut short has left it.
fn is_left_over(entry: &fs::DirEntry) -> bool {
    let name = entry.file_name();
    let kind = name.to_str().and_then(|name| name.strip_prefix(UNFINISHED));
    let ours = kind.is_some_and(|kind| kind.starts_with("step-") || kind.starts_with("removed-step-"));
    ours && entry.file_type().is_ok_and(|kind| kind.is_dir())
}

/// A save that has begun. Dropped, it takes back what it has made.
pub(super) struct Commit<'a> {
    store: &'a Checkpoints,
    step: u64,
    unfinished: PathBuf,
    /// What could not be removed of what others have left.
    left: Option<CheckpointError>,
    complete: bool,
}

impl<'a> Commit<'a> {
    /// Keeps other runs out, removes what killed ones have left, and makes the directory to write to.
    pub fn begin(store: &'a Checkpoints, locks: &FileLocks, step: u64) -> Result<Self, CheckpointError> {
        let (disk, directory) = (&store.disk, &store.directory);
        disk.create_directories(directory)?;
        lock(disk, locks, directory)?;
        if let Some(latest) = store.entries()?.pop().filter(|latest| latest.step > step) {
            return Err(CheckpointError::NotLatest { path: directory.clone(), latest: latest.step, step });
        }
        let left = remove_left_over(disk, directory)?;
        let unfinished = directory.join(unfinished_name(&name(step, 0)));
        disk.create_directory(&unfinished)?;
        Ok(Commit { store, step, unfinished, left, complete: false })
    }

    /// Name of the directory to write to.
    pub fn unfinished_name(&self) -> String {
        self.unfinished.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Writes the index and puts the checkpoint in its place.
    pub fn complete(mut self, index: &Index) -> Result<Complete<'a>, CheckpointError> {
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
        let name = name(self.step, repeats.max().unwrap_or(0));
        disk.put(&self.unfinished, &directory.join(&name))?;
        self.complete = true;
        disk.sync_directory(directory)?;
        let (step, left) = (self.step, self.left.take());
        Ok(Complete { store: self.store, step, name, earlier, left })
    }
}

impl Drop for Commit<'_> {
    fn drop(&mut self) {
        if !self.complete {
            // The error that led here says more than that of removing what is of no use to anyone.
            let _ = fs::remove_dir_all(&self.unfinished);
        }
    }
}

/// A save whose checkpoint is in its place.
pub(super) struct Complete<'a> {
    store: &'a Checkpoints,
    step: u64,
    name: String,
    /// The checkpoints that there were before.
    earlier: Vec<Entry>,
    left: Option<CheckpointError>,
}

impl Complete<'_> {
    /// Name of the checkpoint's directory.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Removes what the checkpoint replaces and what is not to be kept; goes on after an error, and returns the first.
    pub fn remove_old(self) -> Result<(), CheckpointError> {
        let (disk, directory) = (&self.store.disk, &self.store.directory);
        // What is damaged is no checkpoint to keep, and its user's to look into.
        let sound = self.earlier.into_iter().filter(|entry| entry.path.join(INDEX_FILE).is_file());
        let (mut old, others): (Vec<Entry>, Vec<Entry>) = sound.partition(|entry| entry.step == self.step);
        if let Some(keep) = self.store.keep {
            let surplus = (others.len() + 1).saturating_sub(keep);
            old.extend(others.into_iter().take(surplus));
        }
        let mut outcome = self.left.map_or(Ok(()), Err);
        // They go at once, however long their files take, and for good before the first of their files is lost.
        let mut going = Vec::with_capacity(old.len());
        for entry in old {
            let away = format!("removed-{}", name(entry.step, entry.repeat));
            let away = directory.join(unfinished_name(&away));
            match disk.take_away(&entry.path, &away) {
                Ok(()) => going.push(away),
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        if !going.is_empty() {
            disk.sync_directory(directory)?;
        }
        for away in going {
            outcome = outcome.and(disk.remove_directory(&away));
        }
        outcome
    }
}

/// Keeps other runs out of the directory, until the run that `locks` is of is gone. A file system without locks keeps out
/// none.
fn lock(disk: &Disk, locks: &FileLocks, directory: &Path) -> Result<(), CheckpointError> {
    let canonical = fs::canonicalize(directory).map_err(FileError::on("open", directory))?;
    let path = directory.join(LOCK_FILE);
    let held = locks.hold(&canonical.join(LOCK_FILE), || {
        let open = || File::options().write(true).create(true).truncate(false).open(&path);
        let file = disk.run("open", &path, open)?;
        disk.run("lock", &path, || FileLock::acquire(file))
    });
    match held {
        Ok(true) => Ok(()),
        Ok(false) => Err(CheckpointError::Busy { path: directory.to_path_buf() }),
        Err(CheckpointError::File(error)) if error.cause.kind() == io::ErrorKind::Unsupported => Ok(()),
        Err(error) => Err(error),
    }
}

/// Removes what saves have left that were cut short; returns the first error of a removal, which is no reason not to
/// save.
fn remove_left_over(disk: &Disk, directory: &Path) -> Result<Option<CheckpointError>, CheckpointError> {
    let read = |error| FileError::on("read", directory)(error);
    let mut first = None;
    for entry in fs::read_dir(directory).map_err(read)? {
        let entry = entry.map_err(read)?;
        if is_left_over(&entry)
            && let Err(error) = disk.remove_directory(&entry.path())
        {
            first.get_or_insert(error);
        }
    }
    Ok(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_steps_and_repeats() {
        assert_eq!(parse_name("step-00000100"), Some((100, 0)));
        assert_eq!(parse_name("step-00000100-2"), Some((100, 2)));
        assert_eq!(parse_name("step-12345678901"), Some((12345678901, 0)));
        for other in ["step-", "step-1", "step-1x", "step-+0000001", "step-00000001-", "step-00000001-0", "1"]
        {
            assert_eq!(parse_name(other), None, "{other}");
        }
        assert_eq!(parse_name("step-00000001-18446744073709551615"), None);
        assert_eq!(parse_name(".unfinished-step-00000001"), None);
    }
}
