//! The file operations of a save, one by one, so that tests can make any of them fail.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use crate::error::CheckpointError;
use crate::files::FileError;

type Hook = Arc<dyn Fn(&'static str, &Path) -> io::Result<()> + Send + Sync>;

/// Runs file operations, and before each one what a test wants.
#[derive(Clone, Default)]
pub(super) struct Disk {
    hook: Option<Hook>,
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Disk")
    }
}

impl Disk {
    pub fn with_hook(hook: Hook) -> Self {
        Disk { hook: Some(hook) }
    }

    /// Runs `operation`, named as in "cannot write `path`".
    pub fn run<T>(
        &self,
        action: &'static str,
        path: &Path,
        operation: impl FnOnce() -> io::Result<T>,
    ) -> Result<T, CheckpointError> {
        let before = self.hook.as_ref().map_or(Ok(()), |hook| hook(action, path));
        Ok(before.and_then(|()| operation()).map_err(FileError::on(action, path))?)
    }

    pub fn write(&self, path: &Path, file: &mut File, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.run("write", path, || file.write_all(bytes))
    }

    /// What was written to the file reaches the disk.
    pub fn sync(&self, path: &Path, file: &File) -> Result<(), CheckpointError> {
        self.run("sync", path, || file.sync_all())
    }

    /// What was made, renamed or removed in the directory reaches the disk.
    pub fn sync_directory(&self, path: &Path) -> Result<(), CheckpointError> {
        self.run("sync", path, || sync_directory(path))
    }

    pub fn create(&self, path: &Path) -> Result<File, CheckpointError> {
        self.run("create", path, || File::options().write(true).create_new(true).open(path))
    }

    /// Makes a new directory.
    pub fn create_directory(&self, path: &Path) -> Result<(), CheckpointError> {
        self.run("create", path, || fs::create_dir(path))
    }

    /// Makes a directory, and those that it is in, where they are not there. They are on the disk when this returns.
    pub fn create_directories(&self, path: &Path) -> Result<(), CheckpointError> {
        if path.is_dir() {
            return Ok(());
        }
        let parent = match path.parent() {
            Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
            Some(parent) => parent,
            None => path,
        };
        if parent != path {
            self.create_directories(parent)?;
        }
        self.run("create", path, || match fs::create_dir(path) {
            // Another program was faster.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
            made => made,
        })?;
        self.sync_directory(parent)
    }

    /// Puts what is at `from` in a place of its own.
    pub fn put(&self, from: &Path, to: &Path) -> Result<(), CheckpointError> {
        self.run("create", to, || fs::rename(from, to))
    }

    /// Takes what is at `from` out of its place.
    pub fn take_away(&self, from: &Path, to: &Path) -> Result<(), CheckpointError> {
        self.run("remove", from, || fs::rename(from, to))
    }

    pub fn remove_directory(&self, path: &Path) -> Result<(), CheckpointError> {
        self.run("remove", path, || fs::remove_dir_all(path))
    }
}

#[cfg(unix)]
fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Elsewhere a directory cannot be opened, and renames are written through.
#[cfg(not(unix))]
fn sync_directory(_: &Path) -> io::Result<()> {
    Ok(())
}
