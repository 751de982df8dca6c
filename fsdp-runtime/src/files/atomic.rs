//! A file that appears whole under its name, or not at all.
//!
//! By hand: tempfile and atomic-write-file keep no list of what a program that ends without dropping has to remove, and
//! tempfile's files are closed to other users.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::FileError;

/// The temporary files of this program, which a rename or a drop takes away.
static UNFINISHED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn unfinished() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes what this program has not finished writing: for one that ends without dropping what it has. Nothing can be committed
/// after it.
pub fn remove_unfinished() {
    for path in unfinished().iter() {
        // Nothing can be done about a failure here.
        let _ = fs::remove_file(path);
    }
}

/// A new file written beside its target and renamed over it by [`commit`](AtomicFile::commit).
///
/// Creating it is the check that the place is writable, so a program that writes results at its end opens
/// them at its start. Dropped without a commit, it leaves the target as it was.
#[derive(Debug)]
#[must_use = "the target changes only by `commit`"]
pub struct AtomicFile {
    writer: BufWriter<File>,
    target: PathBuf,
    temporary: PathBuf,
    committed: bool,
}

impl AtomicFile {
    /// Opens a temporary file in the directory of `target`; a symbolic link is followed.
    ///
    /// # Errors
    /// The directory does not exist or is not writable, or `target` exists and is not a regular file.
    pub fn create(target: &Path) -> Result<Self, FileError> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let target = match fs::metadata(target) {
            Ok(existing) if !existing.is_file() => {
                let cause = io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
                return Err(FileError { action: "write", path: target.to_path_buf(), cause });
            }
            Ok(_) => fs::canonicalize(target).map_err(FileError::on("write", target))?,
            Err(_) => target.to_path_buf(),
        };
        // `a/` has the file name `a`, and no file can be put there.
        let is_directory = target.as_os_str().as_encoded_bytes().ends_with(b"/");
        let Some(name) = target.file_name().filter(|_| !is_directory) else {
            let cause = io::Error::new(io::ErrorKind::InvalidInput, "it has no file name");
            return Err(FileError { action: "write", path: target, cause });
        };
        let serial = COUNTER.fetch_add(1, Ordering::Relaxed);
        let temporary =
            target.with_file_name(format!(".{}.{}-{serial}.tmp", name.display(), std::process::id()));
        let mut unfinished = unfinished();
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&temporary)
            .map_err(FileError::on("write", &target))?;
        unfinished.insert(temporary.clone());
        Ok(Self { writer: BufWriter::with_capacity(1 << 18, file), target, temporary, committed: false })
    }

    /// The name the file will have.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Flushes to the disk and renames over the target.
    ///
    /// # Errors
    /// A write or the rename failed; the target is then as it was.
    pub fn commit(mut self) -> Result<(), FileError> {
        self.writer.flush().map_err(FileError::on("write", &self.target))?;
        self.writer.get_ref().sync_all().map_err(FileError::on("write", &self.target))?;
        fs::rename(&self.temporary, &self.target).map_err(FileError::on("write", &self.target))?;
        self.committed = true;
        unfinished().remove(&self.temporary);
        Ok(())
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

impl Seek for AtomicFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.writer.seek(to)
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.committed {
            // Nothing can be done about a failure here, and the target is untouched either way.
            let _ = fs::remove_file(&self.temporary);
            unfinished().remove(&self.temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(dir: &Path) -> Vec<String> {
        let names = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    #[test]
    fn a_name_of_a_directory_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["out.svg/", ".."] {
            let target = dir.path().join(name);
            assert!(AtomicFile::create(&target).is_err(), "{name}");
        }
        assert_eq!(entries(dir.path()), [""; 0]);
    }

    #[test]
    fn the_target_changes_only_at_the_commit() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out.txt");
        fs::write(&target, "old").unwrap();
        let mut file = AtomicFile::create(&target).unwrap();
        file.write_all(b"new").unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "old");
        file.commit().unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "new");
        assert_eq!(entries(dir.path()), ["out.txt"]);
    }

    #[test]
    fn dropped_without_a_commit_it_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = AtomicFile::create(&dir.path().join("out.txt")).unwrap();
        file.write_all(b"half").unwrap();
        assert_eq!(entries(dir.path()).len(), 1);
        drop(file);
        assert!(entries(dir.path()).is_empty());
    }

    #[test]
    fn a_missing_directory_and_a_directory_as_target_fail_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("nowhere").join("out.txt");
        let message = AtomicFile::create(&target).unwrap_err().to_string();
        assert!(message.starts_with(&format!("cannot write `{}`: ", target.display())), "{message}");
        let message = AtomicFile::create(dir.path()).unwrap_err().to_string();
        let expected = format!("cannot write `{}`: it is not a regular file", dir.path().display());
        assert_eq!(message, expected);
    }

    #[cfg(unix)]
    #[test]
    fn a_symbolic_link_stays_one() {
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        fs::write(&real, "old").unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let mut file = AtomicFile::create(&link).unwrap();
        file.write_all(b"new").unwrap();
        file.commit().unwrap();
        assert_eq!(fs::read_to_string(&real).unwrap(), "new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }
}
