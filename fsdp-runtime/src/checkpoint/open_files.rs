//! Keeps a few files of a checkpoint open at a time.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use crate::files;
use crate::sync::Mutex;

/// Files that one reader holds open: a process may have many readers, and a checkpoint of many ranks many files.
const OPEN: usize = 8;

/// The open files, the one used last in front.
#[derive(Debug, Default)]
pub(super) struct OpenFiles(Mutex<VecDeque<(usize, File)>>);

impl OpenFiles {
    /// Fills `bytes` from `offset` on with those of file `index`, which is at `path`.
    pub fn read_at(&self, index: usize, path: &Path, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let mut open = self.0.lock();
        match open.iter().position(|(other, _)| *other == index) {
            Some(0) => {}
            Some(at) => {
                let file = open.remove(at).expect("it is there");
                open.push_front(file);
            }
            None => {
                let file = open_regular(path)?;
                open.truncate(OPEN - 1);
                open.push_front((index, file));
            }
        }
        // The position is set before each read: what another thread left behind does not matter.
        let (_, file) = &mut open[0];
        file.seek(SeekFrom::Start(offset))?;
        file.read_exact(bytes)
    }
}

/// Opens a file of a checkpoint: never through a symbolic link, which may lead out of the directory, and never what is
/// no file, which may never end.
pub(super) fn open_regular(path: &Path) -> io::Result<File> {
    files::open_no_link(path)
}

/// The length of a file of a checkpoint.
pub(super) fn regular_length(path: &Path) -> io::Result<u64> {
    let metadata = fs::symlink_metadata(path)?;
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    Ok(metadata.len())
}
