//! Reads a complete checkpoint by ranges of elements.

use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use serde::de::DeserializeOwned;

use super::commit::parse_name;
use super::index::{BLOCK, INDEX_FILE, Index, Section, StoredDtype, StoredTensor};
use super::open_files::{OpenFiles, open_regular, regular_length};
use crate::error::CheckpointError;
use crate::files::{FileError, listed, said};

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
        let (index, digest) = read_index(&directory)?;
        for stored in &index.files {
            let path = directory.join(&stored.name);
            let length = regular_length(&path).map_err(FileError::on("open", &path))?;
            if length != stored.bytes {
                let reason = format!("it has {length} bytes, {} were written", stored.bytes);
                return Err(CheckpointError::Malformed { path, reason });
            }
        }
        Ok(Checkpoint { directory, index, digest, files: OpenFiles::default() })
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
            let reason = format!("its value `{name}` is not what is expected: {}", said(error));
            CheckpointError::Malformed { path: self.directory.join(INDEX_FILE), reason }
        })
    }

    /// The tensors of a section.
    ///
    /// # Errors
    /// If there is no such section.
    pub fn section(&self, section: &str) -> Result<&Section, CheckpointError> {
        self.index.tensors.get(section).ok_or_else(|| {
            let sections: Vec<&str> = self.index.tensors.keys().map(String::as_str).collect();
            self.absent(format!("section `{section}`"), sections)
        })
    }

    /// A tensor.
    ///
    /// # Errors
    /// If there is no such section or tensor.
    pub fn tensor(&self, section: &str, name: &str) -> Result<&StoredTensor, CheckpointError> {
        let tensors = self.section(section)?;
        tensors
            .get(name)
            .ok_or_else(|| self.absent(format!("tensor `{section}:{name}`"), vec!["other tensors there"]))
    }

    fn absent(&self, what: String, present: Vec<&str>) -> CheckpointError {
        let present = listed(&present);
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
        if !tensor.dtype.is_float() {
            let message = format!("tensor `{section}:{name}` is {}, expected floats", tensor.dtype);
            return Err(CheckpointError::Usage(message));
        }
        let mut buffer = Vec::new();
        self.blocks(section, name, start..start.saturating_add(out.len()), |block| {
            let out = &mut out[block.at..block.at + block.wanted.len() / tensor.dtype.size()];
            if tensor.dtype == StoredDtype::F32 && block.is_whole() && cfg!(target_endian = "little") {
                return self.read_block(&block, bytemuck::cast_slice_mut(out));
            }
            buffer.resize(block.len, 0);
            self.read_block(&block, &mut buffer)?;
            widen(tensor.dtype, &buffer[block.wanted.clone()], out);
            Ok(())
        })
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
        let mut out = Vec::new();
        let mut buffer = Vec::new();
        self.blocks(section, name, range, |block| {
            buffer.resize(block.len, 0);
            self.read_block(&block, &mut buffer)?;
            out.extend_from_slice(&buffer[block.wanted.clone()]);
            Ok(())
        })?;
        Ok(out)
    }

    /// Calls `take` for the blocks that the elements `range` are in, in order.
    fn blocks<'a>(
        &'a self,
        section: &'a str,
        name: &'a str,
        range: Range<usize>,
        mut take: impl FnMut(Block<'a>) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let tensor = self.tensor(section, name)?;
        let (Range { start, end }, numel) = (range.clone(), tensor.numel());
        if start > end || end > numel {
            let message =
                format!("elements {range:?} of tensor `{section}:{name}` were asked for: it has {numel}");
            return Err(CheckpointError::Usage(message));
        }
        let first = tensor.parts.partition_point(|part| part.start + part.len <= start);
        for part in tensor.parts[first..].iter().take_while(|part| part.start < end) {
            let (from, to) = (start.max(part.start), end.min(part.start + part.len));
            let size = tensor.dtype.size();
            let wanted = (from - part.start) * size..(to - part.start) * size;
            for index in wanted.start / BLOCK..wanted.end.div_ceil(BLOCK) {
                // Blocks are whole elements.
                let block = index * BLOCK..((index + 1) * BLOCK).min(part.len * size);
                let here = wanted.start.max(block.start)..wanted.end.min(block.end);
                take(Block {
                    tensor: (section, name),
                    file: part.file,
                    offset: part.offset + block.start as u64,
                    len: block.len(),
                    crc32: part.crc32[index],
                    at: part.start + here.start / size - start,
                    wanted: here.start - block.start..here.end - block.start,
                })?;
            }
        }
        Ok(())
    }

    /// Reads a block into `bytes`, which have its length, and checks it.
    fn read_block(&self, block: &Block<'_>, bytes: &mut [u8]) -> Result<(), CheckpointError> {
        self.read_at(block.file, block.offset, bytes)?;
        let (found, expected) = (crc32fast::hash(bytes), block.crc32);
        if found != expected {
            let (path, offset, len) = (self.file_path(block.file), block.offset, block.len as u64);
            let tensor = format!("{}:{}", block.tensor.0, block.tensor.1);
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
}

impl Index {
    /// Reads the index of the checkpoint in `directory`, and none of its files. Local.
    ///
    /// # Errors
    /// If it is not a checkpoint, not complete, of a later format, or the index is damaged.
    pub fn read(directory: impl AsRef<Path>) -> Result<Index, CheckpointError> {
        Ok(read_index(directory.as_ref())?.0)
    }
}

/// An index and its checksum.
fn read_index(directory: &Path) -> Result<(Index, u32), CheckpointError> {
    let path = directory.join(INDEX_FILE);
    let file = match open_regular(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && directory.is_dir() => {
            let name = directory.file_name().and_then(|name| name.to_str());
            if name.is_some_and(|name| parse_name(name).is_some()) {
                let reason = "it is not there, though a checkpoint gets its name only when it is complete: it was damaged \
                              since";
                return Err(CheckpointError::Malformed { path, reason: reason.into() });
            }
            return Err(CheckpointError::NotACheckpoint { path: directory.to_path_buf() });
        }
        opened => opened.map_err(FileError::on("open", &path))?,
    };
    let length = file.metadata().map_err(FileError::on("read", &path))?.len();
    let mut bytes = Vec::new();
    if length <= MAX_INDEX {
        // It may grow.
        file.take(MAX_INDEX + 1).read_to_end(&mut bytes).map_err(FileError::on("read", &path))?;
    }
    if length.max(bytes.len() as u64) > MAX_INDEX {
        let reason = format!("it is larger than {MAX_INDEX} bytes");
        return Err(CheckpointError::Malformed { path, reason });
    }
    Ok((Index::decode(&path, &bytes)?, crc32fast::hash(&bytes)))
}

/// Bytes under one checksum, some of which are wanted.
struct Block<'a> {
    /// Section and name.
    tensor: (&'a str, &'a str),
    file: usize,
    /// First byte in the file.
    offset: u64,
    /// Number of bytes.
    len: usize,
    crc32: u32,
    /// Where its wanted elements go, in elements since the first that was asked for.
    at: usize,
    /// Which of its bytes are wanted.
    wanted: Range<usize>,
}

impl Block<'_> {
    /// All of it is wanted.
    fn is_whole(&self) -> bool {
        self.wanted == (0..self.len)
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
