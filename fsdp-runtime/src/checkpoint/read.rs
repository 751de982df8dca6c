//! A complete checkpoint, read by ranges.

use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use serde::de::DeserializeOwned;

use super::error::CheckpointError;
use super::index::{BLOCK, INDEX_FILE, Index, StoredDtype, StoredPart, StoredTensor};
use super::open_files::{OpenFiles, open_regular, regular_length};
use crate::files::FileError;

/// Largest index that is read: one of a model with a million tensors is smaller.
const MAX_INDEX: u64 = 1 << 30;

/// An open checkpoint. Only its index is in memory; tensors are read by ranges, and every byte that is read is checked
/// against its checksum. Files are read at positions rather than mapped: a file that another program cuts short is an
/// error, not a signal. Threads may share it.
///
/// A checkpoint may come from anywhere: nothing outside its directory is read, no link is followed in it, and memory is
/// in proportion to its index, which has 1 GiB at most, and to what is asked for. Checksums find what was damaged, not
/// what was changed on purpose.
#[derive(Debug)]
pub struct Checkpoint {
    directory: PathBuf,
    index: Index,
    /// Checksum of the index.
    digest: u32,
    files: OpenFiles,
}

impl Checkpoint {
    /// Opens the checkpoint in `directory`: reads its index and checks that its files are there, with their lengths.
    /// Local.
    ///
    /// # Errors
    /// If it is not a checkpoint, not complete, of a later format, or the index is damaged.
    pub fn open(directory: impl AsRef<Path>) -> Result<Checkpoint, CheckpointError> {
        let directory = directory.as_ref().to_path_buf();
        let path = directory.join(INDEX_FILE);
        let file = match open_regular(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && directory.is_dir() => {
                return Err(CheckpointError::NotACheckpoint { path: directory });
            }
            opened => opened.map_err(FileError::on("open", &path))?,
        };
        let mut bytes = Vec::new();
        file.take(MAX_INDEX + 1).read_to_end(&mut bytes).map_err(FileError::on("read", &path))?;
        if bytes.len() as u64 > MAX_INDEX {
            let reason = format!("it is larger than {MAX_INDEX} bytes");
            return Err(CheckpointError::Malformed { path, reason });
        }
        let index = Index::decode(&path, &bytes)?;
        for stored in &index.files {
            let path = directory.join(&stored.name);
            let length = regular_length(&path).map_err(FileError::on("open", &path))?;
            if length != stored.bytes {
                let reason = format!("it has {length} bytes, {} were written", stored.bytes);
                return Err(CheckpointError::Malformed { path, reason });
            }
        }
        Ok(Checkpoint { directory, index, digest: crc32fast::hash(&bytes), files: OpenFiles::default() })
    }

    /// The directory it is in.
    pub fn path(&self) -> &Path {
        &self.directory
    }

    /// What it holds, and where.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Checksum of the index: two that are the same have the same contents.
    pub(super) fn digest(&self) -> u32 {
        self.digest
    }

    /// Optimizer steps taken.
    pub fn step(&self) -> u64 {
        self.index.step
    }

    /// Small state that was saved under `name` by [`Contents::value`](super::Contents::value).
    ///
    /// # Errors
    /// If there is none, or it is not a `T`.
    pub fn value<T: DeserializeOwned>(&self, name: &str) -> Result<T, CheckpointError> {
        let value = self.index.values.get(name).ok_or_else(|| {
            let names: Vec<&str> = self.index.values.keys().map(String::as_str).collect();
            self.absent(format!("value `{name}`"), names)
        })?;
        serde_json::from_value(value.clone()).map_err(|error| {
            let reason = format!("its value `{name}` is not what is expected: {error}");
            CheckpointError::Malformed { path: self.directory.join(INDEX_FILE), reason }
        })
    }

    /// A tensor.
    ///
    /// # Errors
    /// If there is no such section or tensor.
    pub fn tensor(&self, section: &str, name: &str) -> Result<&StoredTensor, CheckpointError> {
        let tensors = self.index.tensors.get(section).ok_or_else(|| {
            let sections: Vec<&str> = self.index.tensors.keys().map(String::as_str).collect();
            self.absent(format!("section `{section}`"), sections)
        })?;
        tensors
            .get(name)
            .ok_or_else(|| self.absent(format!("tensor `{section}:{name}`"), vec!["other tensors there"]))
    }

    fn absent(&self, what: String, present: Vec<&str>) -> CheckpointError {
        let present = if present.is_empty() { "none".to_owned() } else { present.join(", ") };
        CheckpointError::Absent { path: self.directory.clone(), what, present }
    }

    /// Reads elements `start..start + out.len()` of a flattened tensor of floats, converted to f32.
    ///
    /// # Errors
    /// If there is no such tensor, it is shorter, or of integers; if a read fails; if what is there is not what was
    /// written, with file and offset.
    pub fn read_f32(
        &self,
        section: &str,
        name: &str,
        start: usize,
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        let tensor = self.tensor(section, name)?;
        if !matches!(tensor.dtype, StoredDtype::F32 | StoredDtype::BF16 | StoredDtype::F16 | StoredDtype::F64)
        {
            let message = format!("tensor `{section}:{name}` is {}, expected floats", tensor.dtype);
            return Err(CheckpointError::Usage(message));
        }
        self.read(section, name, start, out.len(), |at, bytes| widen(tensor.dtype, bytes, &mut out[at..]))
    }

    /// Reads elements `range` of a flattened tensor as they are, little-endian.
    ///
    /// # Errors
    /// As for [`Checkpoint::read_f32`].
    pub fn read_bytes(
        &self,
        section: &str,
        name: &str,
        range: Range<usize>,
    ) -> Result<Vec<u8>, CheckpointError> {
        let size = self.tensor(section, name)?.dtype.size();
        let mut out = Vec::new();
        self.read(section, name, range.start, range.len(), |at, bytes| {
            debug_assert_eq!(out.len(), at * size);
            out.extend_from_slice(bytes);
        })?;
        Ok(out)
    }

    /// Calls `take(elements since start, bytes)` for the elements `start..start + len`, in order.
    fn read(
        &self,
        section: &str,
        name: &str,
        start: usize,
        len: usize,
        mut take: impl FnMut(usize, &[u8]),
    ) -> Result<(), CheckpointError> {
        let tensor = self.tensor(section, name)?;
        let Some(end) = start.checked_add(len).filter(|end| *end <= tensor.numel()) else {
            let message = format!(
                "elements {start}..{} of tensor `{section}:{name}` were asked for: it has {}",
                start.saturating_add(len),
                tensor.numel()
            );
            return Err(CheckpointError::Usage(message));
        };
        let first = tensor.parts.partition_point(|part| part.start + part.len <= start);
        let mut block = Vec::new();
        for part in tensor.parts[first..].iter().take_while(|part| part.start < end) {
            let (from, to) = (start.max(part.start), end.min(part.start + part.len));
            let size = tensor.dtype.size();
            let wanted = (from - part.start) * size..(to - part.start) * size;
            for index in wanted.start / BLOCK..wanted.end.div_ceil(BLOCK) {
                self.read_block((section, name), part, part.len * size, index, &mut block)?;
                // Blocks are whole elements.
                let here = wanted.start.max(index * BLOCK)..wanted.end.min((index + 1) * BLOCK);
                let at = part.start + here.start / size - start;
                take(at, &block[here.start - index * BLOCK..here.end - index * BLOCK]);
            }
        }
        Ok(())
    }

    /// Reads and checks block `index` of a part of `bytes` bytes.
    fn read_block(
        &self,
        (section, name): (&str, &str),
        part: &StoredPart,
        bytes: usize,
        index: usize,
        block: &mut Vec<u8>,
    ) -> Result<(), CheckpointError> {
        let start = index * BLOCK;
        block.resize(BLOCK.min(bytes - start), 0);
        let offset = part.offset + start as u64;
        self.read_at(part.file, offset, block)?;
        let (found, expected) = (crc32fast::hash(block), part.crc32[index]);
        if found != expected {
            let (path, len) = (self.file_path(part.file), block.len() as u64);
            let tensor = format!("{section}:{name}");
            return Err(CheckpointError::Corrupted { path, offset, len, tensor, expected, found });
        }
        Ok(())
    }

    fn read_at(&self, file: usize, offset: u64, bytes: &mut [u8]) -> Result<(), CheckpointError> {
        let path = self.file_path(file);
        self.files.read_at(file, &path, offset, bytes).map_err(|error| match error.kind() {
            // It was long enough when it was opened.
            io::ErrorKind::UnexpectedEof => {
                let reason = format!("it ends before byte {}", offset + bytes.len() as u64);
                CheckpointError::Malformed { path, reason }
            }
            _ => FileError::on("read", &path)(error).into(),
        })
    }

    fn file_path(&self, file: usize) -> PathBuf {
        self.directory.join(&self.index.files[file].name)
    }

    /// Reads everything and checks it, `progress(bytes)` after each tensor. Returns all that is wrong. Local.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn verify(&self, mut progress: impl FnMut(u64)) -> Result<Vec<CheckpointError>, CheckpointError> {
        let (mut wrong, mut block) = (Vec::new(), Vec::new());
        for (index, header) in self.header_lengths().into_iter().enumerate() {
            let mut checksum = crc32fast::Hasher::new();
            for start in (0..header).step_by(BLOCK) {
                block.resize((header - start).min(BLOCK as u64) as usize, 0);
                self.read_at(index, start, &mut block)?;
                checksum.update(&block);
            }
            let (found, expected) = (checksum.finalize(), self.index.files[index].header_crc32);
            if found != expected {
                let (path, len, tensor) = (self.file_path(index), header, "header".to_owned());
                wrong.push(CheckpointError::Corrupted { path, offset: 0, len, tensor, expected, found });
            }
        }
        for (section, tensors) in &self.index.tensors {
            for (name, tensor) in tensors {
                for part in &tensor.parts {
                    for index in 0..part.crc32.len() {
                        let bytes = part.len * tensor.dtype.size();
                        match self.read_block((section, name), part, bytes, index, &mut block) {
                            Err(error @ CheckpointError::Corrupted { .. }) => wrong.push(error),
                            other => other?,
                        }
                    }
                }
                progress(tensor.bytes() as u64);
            }
        }
        Ok(wrong)
    }

    /// Of each file, the bytes before its tensors.
    fn header_lengths(&self) -> Vec<u64> {
        let mut lengths: Vec<u64> = self.index.files.iter().map(|file| file.bytes).collect();
        let tensors = self.index.tensors.values().flat_map(|section| section.values());
        for part in tensors.flat_map(|tensor| &tensor.parts) {
            lengths[part.file] = lengths[part.file].min(part.offset);
        }
        lengths
    }
}

fn widen(dtype: StoredDtype, bytes: &[u8], out: &mut [f32]) {
    fn each<const N: usize>(bytes: &[u8], out: &mut [f32], convert: impl Fn([u8; N]) -> f32) {
        let (elements, _) = bytes.as_chunks::<N>();
        for (value, &element) in out.iter_mut().zip(elements) {
            *value = convert(element);
        }
    }
    match dtype {
        StoredDtype::BF16 => match bytemuck::try_cast_slice::<u8, bf16>(bytes) {
            Ok(values) if cfg!(target_endian = "little") => {
                values.convert_to_f32_slice(&mut out[..values.len()])
            }
            _ => each(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        },
        StoredDtype::F16 => match bytemuck::try_cast_slice::<u8, f16>(bytes) {
            Ok(values) if cfg!(target_endian = "little") => {
                values.convert_to_f32_slice(&mut out[..values.len()])
            }
            _ => each(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        },
        StoredDtype::F64 => each(bytes, out, |b| f64::from_le_bytes(b) as f32),
        _ => each(bytes, out, f32::from_le_bytes),
    }
}
