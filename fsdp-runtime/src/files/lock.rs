//! A file lock that one holder has at a time, among all programs.

use std::collections::HashMap;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use crate::sync::Mutex;

/// A file that is locked while this lives.
pub(crate) struct FileLock(File);

impl FileLock {
    /// Locks the file; `None` if another holder has it, in this program or another one.
    ///
    /// # Errors
    /// As for [`File::try_lock`]: among others, on a file system that has no locks.
    pub fn acquire(file: File) -> io::Result<Option<FileLock>> {
        match file.try_lock() {
            Ok(()) => Ok(Some(FileLock(file))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Whether what is at `path` is still this file: someone may have removed it, and others would lock a new one.
    fn is_at(&self, path: &Path) -> bool {
        let (Ok(held), Ok(there)) = (self.0.metadata(), fs::metadata(path)) else { return false };
        is_same(&held, &there)
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // To close the file is not enough: a child process that another thread is starting holds it too, until it runs
        // its program.
        let _ = self.0.unlock();
    }
}

#[cfg(unix)]
fn is_same(a: &fs::Metadata, b: &fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

/// Elsewhere a file that is open cannot be replaced.
#[cfg(not(unix))]
fn is_same(_: &fs::Metadata, _: &fs::Metadata) -> bool {
    true
}

/// The files that one run has locked, by path.
#[derive(Default)]
pub(crate) struct FileLocks(Mutex<HashMap<PathBuf, FileLock>>);

impl FileLocks {
    /// Locks what is at `path` by `acquire`, if it is not locked yet; false if another run has it.
    ///
    /// # Errors
    /// Those of `acquire`.
    pub fn hold<E>(
        &self,
        path: &Path,
        acquire: impl FnOnce() -> Result<Option<FileLock>, E>,
    ) -> Result<bool, E> {
        let mut held = self.0.lock();
        if held.get(path).is_some_and(|lock| lock.is_at(path)) {
            return Ok(true);
        }
        let Some(lock) = acquire()? else { return Ok(false) };
        held.insert(path.to_path_buf(), lock);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(path: &Path) -> File {
        File::options().write(true).create(true).truncate(false).open(path).unwrap()
    }

    #[test]
    fn a_lock_ends_with_its_holder_though_a_child_process_has_the_file_too() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let held = FileLock::acquire(open(&path)).unwrap().unwrap();
        let of_child = held.0.try_clone().unwrap();
        assert!(FileLock::acquire(open(&path)).unwrap().is_none());
        drop(held);
        assert!(FileLock::acquire(open(&path)).unwrap().is_some());
        drop(of_child);
    }

    #[test]
    fn a_file_is_held_until_its_run_is_gone_and_again_if_it_was_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let hold = |run: &FileLocks| run.hold(&path, || FileLock::acquire(open(&path))).unwrap();
        let (first, second) = (FileLocks::default(), FileLocks::default());
        assert!(hold(&first) && hold(&first) && !hold(&second));
        fs::remove_file(&path).unwrap();
        assert!(hold(&first) && !hold(&second));
        drop(first);
        assert!(hold(&second));
    }
}
