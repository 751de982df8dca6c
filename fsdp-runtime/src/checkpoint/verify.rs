//! Verifies all checksums of a checkpoint.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use super::index::{BLOCK, Index, StoredFile, StoredPart};
use super::open_files::open_regular;
use super::read::Checkpoint;
#[cfg(doc)]
use super::store::Checkpoints;
use crate::error::CheckpointError;
use crate::files::FileError;

/// A part of a tensor, and whose it is.
struct Place<'a> {
    section: &'a str,
    name: &'a str,
    /// Bytes of an element.
    size: usize,
    part: &'a StoredPart,
}

impl Index {
    /// Reads the checkpoint in `directory`, of which this is the index, whole, and checks it; calls `progress(bytes)` as
    /// it goes. Returns all that is wrong, by file and offset: files that cannot be read or have another length,
    /// blocks that are not what was written; of a checkpoint that was removed meanwhile, as [`Checkpoints::keep`] does, no
    /// more than [`CheckpointError::Removed`]. Local.
    ///
    /// It finds what is wrong with a checkpoint that [`Checkpoint::open`] refuses.
    pub fn verify(&self, directory: &Path, progress: impl FnMut(u64)) -> Vec<CheckpointError> {
        self.verify_files(directory, |_| true, progress)
    }

    /// Verifies the files whose index is `chosen`.
    pub(super) fn verify_files(
        &self,
        directory: &Path,
        chosen: impl Fn(usize) -> bool,
        mut progress: impl FnMut(u64),
    ) -> Vec<CheckpointError> {
        let mut places: Vec<Vec<Place<'_>>> = self.files.iter().map(|_| Vec::new()).collect();
        for (section, tensors) in &self.tensors {
            for (name, tensor) in tensors {
                let size = tensor.dtype.size();
                for part in &tensor.parts {
                    if let Some(places) = places.get_mut(part.file) {
                        places.push(Place { section, name, size, part });
                    }
                }
            }
        }
        let mut wrong = Vec::new();
        let files = self.files.iter().zip(places).enumerate().filter(|(index, _)| chosen(*index));
        for (_, (file, mut places)) in files {
            places.sort_by_key(|place| place.part.offset);
            let path = directory.join(&file.name);
            match Verified::open(&path, file) {
                Ok(mut file) => file.check(&places, &mut wrong, &mut progress),
                Err(error) if error.cause.kind() == io::ErrorKind::NotFound && !directory.exists() => {
                    return vec![CheckpointError::Removed { path: directory.to_path_buf() }];
                }
                Err(error) => wrong.push(error.into()),
            }
        }
        wrong
    }
}

impl Checkpoint {
    /// Reads everything and checks it, as [`Index::verify`]. Returns all that is wrong. Local.
    ///
    /// # Errors
    /// If a file cannot be read, or the checkpoint was removed meanwhile.
    pub fn verify(&self, progress: impl FnMut(u64)) -> Result<Vec<CheckpointError>, CheckpointError> {
        let mut wrong = self.index().verify(self.path(), progress);
        let unreadable = |error: &CheckpointError| {
            matches!(error, CheckpointError::File(_) | CheckpointError::Removed { .. })
        };
        match wrong.iter().position(unreadable) {
            Some(unreadable) => Err(wrong.swap_remove(unreadable)),
            None => Ok(wrong),
        }
    }
}

/// A file that is being checked.
struct Verified<'a> {
    path: &'a Path,
    stored: &'a StoredFile,
    file: File,
    length: u64,
    block: Vec<u8>,
}

impl<'a> Verified<'a> {
    fn open(path: &'a Path, stored: &'a StoredFile) -> Result<Self, FileError> {
        let file = open_regular(path).map_err(FileError::on("open", path))?;
        let length = file.metadata().map_err(FileError::on("read", path))?.len();
        Ok(Verified { path, stored, file, length, block: Vec::new() })
    }

    /// Checks length, header and the parts at `places`, which are sorted.
    fn check(
        &mut self,
        places: &[Place<'_>],
        wrong: &mut Vec<CheckpointError>,
        progress: &mut impl FnMut(u64),
    ) {
        let Verified { stored, length, .. } = *self;
        if length != stored.bytes {
            let reason = format!("it has {length} bytes, {} were written", stored.bytes);
            wrong.push(CheckpointError::Malformed { path: self.path.to_path_buf(), reason });
        }
        let header = places.first().map_or(stored.bytes, |place| place.part.offset);
        let header = (0, header, stored.header_crc32, "header".to_owned());
        let blocks = places.iter().flat_map(|Place { section, name, size, part }| {
            let bytes = (part.len as u64).saturating_mul(*size as u64);
            part.crc32.iter().enumerate().map(move |(index, &expected)| {
                let start = (index * BLOCK) as u64;
                let len = bytes.saturating_sub(start).min(BLOCK as u64);
                (part.offset.saturating_add(start), len, expected, format!("{section}:{name}"))
            })
        });
        for (offset, len, expected, tensor) in std::iter::once(header).chain(blocks) {
            // What was cut off cannot be checked, and has been told.
            if offset.saturating_add(len) > length {
                continue;
            }
            let path = self.path.to_path_buf();
            match self.checksum(offset, len) {
                Ok(found) if found == expected => {}
                Ok(found) => {
                    wrong.push(CheckpointError::Corrupted { path, offset, len, tensor, expected, found });
                }
                Err(error) => wrong.push(error.into()),
            }
            progress(len);
        }
    }

    /// Checksum of what is at `offset`, read a block at a time.
    fn checksum(&mut self, offset: u64, len: u64) -> Result<u32, FileError> {
        let mut hasher = crc32fast::Hasher::new();
        for start in (0..len).step_by(BLOCK) {
            self.block.resize((len - start).min(BLOCK as u64) as usize, 0);
            let (at, block) = (offset + start, &mut self.block[..]);
            let read = self.file.seek(SeekFrom::Start(at)).and_then(|_| self.file.read_exact(block));
            read.map_err(|error| {
                let message = format!("{} bytes at offset {at}: {error}", block.len());
                FileError::on("read", self.path)(io::Error::new(error.kind(), message))
            })?;
            hasher.update(block);
        }
        Ok(hasher.finalize())
    }
}
