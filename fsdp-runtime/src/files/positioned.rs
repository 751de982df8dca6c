//! Reads at given offsets of a file, by std, where each system has another name for it.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use super::FileError;

/// A file open for reads at given offsets, which threads may make at the same time.
///
/// These are plain reads, not a memory map: a file that is cut short while it is in use is an error here, where touching a
/// map of it would end the process.
#[derive(Debug)]
pub struct PositionedFile {
    path: PathBuf,
    file: File,
    len: u64,
    /// Where reads move a cursor that all share.
    #[cfg(not(any(unix, windows)))]
    lock: std::sync::Mutex<()>,
}

impl PositionedFile {
    /// Opens a regular file.
    ///
    /// # Errors
    /// It cannot be opened, or is no regular file.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let file = super::open(path)?;
        let metadata = file.metadata().map_err(FileError::on("read", path))?;
        Ok(PositionedFile {
            path: path.to_path_buf(),
            file,
            len: metadata.len(),
            #[cfg(not(any(unix, windows)))]
            lock: std::sync::Mutex::new(()),
        })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes it had when it was opened.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// It had no bytes when it was opened.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Fills `bytes` with those from `offset` on.
    ///
    /// # Errors
    /// A failed read, or an end of the file before that: both with the offset.
    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<(), FileError> {
        self.read_exact_at(offset, bytes).map_err(|error| {
            let message = format!("{} bytes at offset {offset}: {error}", bytes.len());
            FileError {
                action: "read",
                path: self.path.clone(),
                cause: io::Error::new(error.kind(), message),
            }
        })
    }

    #[cfg(unix)]
    fn read_exact_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.file, bytes, offset)
    }

    #[cfg(windows)]
    fn read_exact_at(&self, mut offset: u64, mut bytes: &mut [u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match std::os::windows::fs::FileExt::seek_read(&self.file, bytes, offset) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => {
                    bytes = &mut bytes[read..];
                    offset += read as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    #[cfg(not(any(unix, windows)))]
    fn read_exact_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        use std::io::{Read, Seek, SeekFrom};
        // The cursor is set before each read: what a panicking thread left behind does not matter.
        let _alone = self.lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut file = &self.file;
        file.seek(SeekFrom::Start(offset))?;
        file.read_exact(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn reads_are_where_they_are_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bytes");
        fs::write(&path, [0, 1, 2, 3, 4, 5]).unwrap();
        let file = PositionedFile::open(&path).unwrap();
        assert_eq!((file.len(), file.is_empty()), (6, false));
        let mut bytes = [0; 3];
        for start in [3, 0, 2] {
            file.read_at(start, &mut bytes).unwrap();
            assert_eq!(bytes.map(u64::from), [start, start + 1, start + 2]);
        }
    }

    #[test]
    fn what_is_not_there_is_an_error_with_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bytes");
        fs::write(&path, [0; 6]).unwrap();
        let file = PositionedFile::open(&path).unwrap();
        fs::write(&path, [0; 4]).unwrap();
        let message = file.read_at(3, &mut [0; 2]).unwrap_err().to_string();
        let expected = format!("cannot read `{}`: 2 bytes at offset 3: ", path.display());
        assert!(message.starts_with(&expected), "{message}");
        let message = PositionedFile::open(dir.path()).unwrap_err().to_string();
        assert!(message.ends_with("it is not a regular file"), "{message}");
    }
}
