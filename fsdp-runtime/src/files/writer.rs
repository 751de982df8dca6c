//! Writing named tensors, range by range.

use std::{
    collections::{BTreeMap, HashMap},
    io::{Seek, SeekFrom, Write},
    path::Path,
};

use half::{bf16, f16};
use safetensors::tensor::{Metadata, TensorInfo};

use super::{AtomicFile, FileError, StoredDtype, TensorFileError};

/// Elements converted at a time.
const CHUNK: usize = 1 << 16;

/// What the header has under this name is no tensor.
const METADATA: &str = "__metadata__";

/// A safetensors file being written: all tensors are declared first, then filled in any order.
///
/// It appears under its name when [`finish`](Self::finish) is called and is complete then.
#[derive(Debug)]
#[must_use = "the file is complete only after `finish`"]
pub struct TensorFileWriter {
    file: AtomicFile,
    tensors: BTreeMap<String, Slot>,
    /// Bytes on their way to the file.
    encoded: Vec<u8>,
}

#[derive(Debug)]
struct Slot {
    dtype: StoredDtype,
    offset: u64,
    elements: usize,
    written: usize,
}

impl TensorFileWriter {
    /// Opens the file and writes the header for tensors of one dtype, in the order given.
    ///
    /// # Errors
    /// The place is not writable, or a name comes twice, or is `__metadata__`, which is reserved.
    pub fn create<'a>(
        path: &Path,
        tensors: impl IntoIterator<Item = (&'a str, &'a [usize])>,
        dtype: StoredDtype,
    ) -> Result<Self, TensorFileError> {
        Self::create_mixed(path, tensors.into_iter().map(|(name, shape)| (name, shape, dtype)))
    }

    /// Creates a file of tensors of several dtypes. Tensors with larger elements come first in it, so that all are aligned,
    /// as PyTorch's reader requires.
    ///
    /// # Errors
    /// As for [`create`](Self::create).
    pub fn create_mixed<'a>(
        path: &Path,
        tensors: impl IntoIterator<Item = (&'a str, &'a [usize], StoredDtype)>,
    ) -> Result<Self, TensorFileError> {
        let mut tensors: Vec<_> = tensors.into_iter().collect();
        tensors.sort_by_key(|(_, _, dtype)| std::cmp::Reverse(dtype.size()));
        let mut file = AtomicFile::create(path)?;
        let mut infos = Vec::new();
        let mut slots = BTreeMap::new();
        let mut end = 0usize;
        for (name, shape, dtype) in tensors {
            if name == METADATA {
                let reason = format!("no tensor in it can have the name `{METADATA}`");
                return Err(TensorFileError::Malformed { path: path.to_path_buf(), reason });
            }
            let bytes = |elements: usize| elements.checked_mul(dtype.size());
            let elements = shape.iter().try_fold(1usize, |elements, &dim| elements.checked_mul(dim));
            let sizes = elements.and_then(|elements| {
                bytes(elements).and_then(|bytes| end.checked_add(bytes)).map(|behind| (elements, behind))
            });
            let Some((elements, behind)) = sizes else {
                let reason =
                    format!("tensor `{name}` of shape {shape:?} makes it longer than can be counted");
                return Err(TensorFileError::Malformed { path: path.to_path_buf(), reason });
            };
            let start = std::mem::replace(&mut end, behind);
            infos.push((
                name.to_owned(),
                TensorInfo { dtype: dtype.safetensors(), shape: shape.to_vec(), data_offsets: (start, end) },
            ));
            let slot = Slot { dtype, offset: start as u64, elements, written: 0 };
            if slots.insert(name.to_owned(), slot).is_some() {
                return Err(TensorFileError::Duplicate { path: path.to_path_buf(), name: name.to_owned() });
            }
        }
        let header = encode_header(infos)
            .map_err(|reason| TensorFileError::Malformed { path: path.to_path_buf(), reason })?;
        file.write_all(&header).map_err(FileError::on("write", path))?;
        let data_start = header.len() as u64;
        slots.values_mut().for_each(|slot| slot.offset += data_start);
        Ok(Self { file, tensors: slots, encoded: Vec::new() })
    }

    /// Writes elements `start..start + values.len()` of a flattened tensor of floats, rounded to nearest even. Each
    /// element is to be written once.
    ///
    /// # Errors
    /// No such tensor, one of integers, a range past its end, or a failed write.
    pub fn write_range_f32(
        &mut self,
        name: &str,
        start: usize,
        values: &[f32],
    ) -> Result<(), TensorFileError> {
        let dtype = self.seek(name, start, |_| values.len())?;
        if !dtype.is_float() {
            let (path, name) = (self.file.target().to_path_buf(), name.to_owned());
            let (found, expected) = (dtype.to_string(), "F32, BF16, F16 or F64");
            return Err(TensorFileError::Dtype { path, name, found, expected });
        }
        for chunk in values.chunks(CHUNK) {
            self.encoded.clear();
            let (encoded, values) = (&mut self.encoded, chunk.iter());
            match dtype {
                StoredDtype::BF16 => encoded.extend(values.flat_map(|&v| bf16::from_f32(v).to_le_bytes())),
                StoredDtype::F16 => encoded.extend(values.flat_map(|&v| f16::from_f32(v).to_le_bytes())),
                StoredDtype::F64 => encoded.extend(values.flat_map(|&v| f64::from(v).to_le_bytes())),
                _ => encoded.extend(values.flat_map(|v| v.to_le_bytes())),
            }
            self.file.write_all(&self.encoded).map_err(FileError::on("write", self.file.target()))?;
        }
        Ok(())
    }

    /// Writes elements of a flattened tensor from `start` on as they are, little-endian and in its dtype. Each element is to
    /// be written once.
    ///
    /// # Errors
    /// No such tensor, a range past its end, or a failed write.
    pub fn write_range_bytes(
        &mut self,
        name: &str,
        start: usize,
        bytes: &[u8],
    ) -> Result<(), TensorFileError> {
        self.seek(name, start, |dtype| bytes.len().div_ceil(dtype.size()))?;
        Ok(self.file.write_all(bytes).map_err(FileError::on("write", self.file.target()))?)
    }

    /// Goes to element `start` of a tensor, from where as many as `len` says are to be written.
    fn seek(
        &mut self,
        name: &str,
        start: usize,
        len: impl FnOnce(StoredDtype) -> usize,
    ) -> Result<StoredDtype, TensorFileError> {
        let path = self.file.target().to_path_buf();
        let Some(slot) = self.tensors.get_mut(name) else {
            return Err(TensorFileError::NoTensor { path, name: name.to_owned() });
        };
        let len = len(slot.dtype);
        if start.checked_add(len).is_none_or(|end| end > slot.elements) {
            let (name, elements) = (name.to_owned(), slot.elements);
            return Err(TensorFileError::OutOfRange { path, name, start, len, elements });
        }
        slot.written += len;
        let position = slot.offset + (start * slot.dtype.size()) as u64;
        self.file.seek(SeekFrom::Start(position)).map_err(FileError::on("write", &path))?;
        Ok(slot.dtype)
    }

    /// Puts the file in its place.
    ///
    /// # Errors
    /// A tensor is not completely written, or writing to the disk failed; no file appears then.
    pub fn finish(self) -> Result<(), TensorFileError> {
        self.check_complete()?;
        Ok(self.file.commit()?)
    }

    /// Whether all of it is written.
    ///
    /// # Errors
    /// [`TensorFileError::Incomplete`] with the first tensor that is not.
    pub fn check_complete(&self) -> Result<(), TensorFileError> {
        for (name, &Slot { elements, written, .. }) in &self.tensors {
            if written != elements {
                let (path, name) = (self.file.target().to_path_buf(), name.clone());
                return Err(TensorFileError::Incomplete { path, name, written, elements });
            }
        }
        Ok(())
    }
}

/// The length and the header, padded so that the data after it are aligned to 8 bytes.
fn encode_header(tensors: Vec<(String, TensorInfo)>) -> Result<Vec<u8>, String> {
    // Readers of the Hugging Face libraries refuse a file without a known `format`.
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(format), tensors).map_err(|e| e.to_string())?;
    let mut json = serde_json::to_vec(&metadata).map_err(|e| e.to_string())?;
    json.resize(json.len().next_multiple_of(8), b' ');
    Ok([&(json.len() as u64).to_le_bytes()[..], &json].concat())
}

/// Writes whole tensors (name, shape, values) as F32.
///
/// # Errors
/// Those of [`TensorFileWriter`].
pub fn save_f32(path: &Path, tensors: &[(&str, &[usize], &[f32])]) -> Result<(), TensorFileError> {
    save(path, tensors, StoredDtype::F32)
}

/// Writes whole tensors (name, shape, values) as BF16, rounded to nearest even.
///
/// # Errors
/// Those of [`TensorFileWriter`].
pub fn save_bf16(path: &Path, tensors: &[(&str, &[usize], &[f32])]) -> Result<(), TensorFileError> {
    save(path, tensors, StoredDtype::BF16)
}

fn save(
    path: &Path,
    tensors: &[(&str, &[usize], &[f32])],
    dtype: StoredDtype,
) -> Result<(), TensorFileError> {
    let declared = tensors.iter().map(|&(name, shape, _)| (name, shape));
    let mut writer = TensorFileWriter::create(path, declared, dtype)?;
    for &(name, _, values) in tensors {
        writer.write_range_f32(name, 0, values)?;
    }
    writer.finish()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use safetensors::{Dtype, SafeTensors};

    use super::{super::TensorFile, *};

    #[test]
    fn what_is_saved_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        // 1 + 2^-8 lies halfway between two bfloat16 values and goes to the even one.
        let values = [0.5, -3.0, 1.0 + 2f32.powi(-8), f32::INFINITY, 0.0, 1e-40];
        let tensors: [(&str, &[usize], &[f32]); 3] =
            [("b", &[2, 3], &values), ("a", &[], &[7.0]), ("none", &[0, 4], &[])];
        save_f32(&path, &tensors).unwrap();
        let file = TensorFile::open(&path).unwrap();
        let mut out = [0.0; 6];
        file.read_range_f32("b", 0, &mut out).unwrap();
        assert_eq!(out, values);
        file.check(tensors.map(|(name, shape, _)| (name, shape))).unwrap();
        save_bf16(&path, &tensors).unwrap();
        let file = TensorFile::open(&path).unwrap();
        file.read_range_f32("b", 0, &mut out).unwrap();
        assert_eq!(out[..5], [0.5, -3.0, 1.0, f32::INFINITY, 0.0]);
        file.read_range_f32("a", 0, &mut out[..1]).unwrap();
        assert_eq!(out[0], 7.0);
    }

    #[test]
    fn the_file_is_valid_and_aligned_for_other_readers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        save_f32(&path, &[("weight", &[3], &[1.0, 2.0, 3.0])]).unwrap();
        let bytes = fs::read(&path).unwrap();
        let (header, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(header % 8, 0);
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let view = tensors.tensor("weight").unwrap();
        assert_eq!((view.dtype(), view.shape()), (Dtype::F32, &[3usize][..]));
        assert_eq!(view.data(), [1f32, 2.0, 3.0].map(f32::to_le_bytes).concat());
    }

    #[test]
    fn ranges_may_come_in_any_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        let declared: [(&str, &[usize]); 2] = [("a", &[4]), ("b", &[3])];
        let mut writer = TensorFileWriter::create(&path, declared, StoredDtype::F32).unwrap();
        writer.write_range_f32("b", 1, &[11.0, 12.0]).unwrap();
        writer.write_range_f32("a", 2, &[2.0, 3.0]).unwrap();
        writer.write_range_f32("b", 0, &[10.0]).unwrap();
        writer.write_range_f32("a", 0, &[0.0, 1.0]).unwrap();
        assert!(!path.exists());
        writer.finish().unwrap();
        let file = TensorFile::open(&path).unwrap();
        let mut out = [0.0; 4];
        file.read_range_f32("a", 0, &mut out).unwrap();
        assert_eq!(out, [0.0, 1.0, 2.0, 3.0]);
        file.read_range_f32("b", 0, &mut out[..3]).unwrap();
        assert_eq!(out[..3], [10.0, 11.0, 12.0]);
    }

    #[test]
    fn an_incomplete_file_does_not_appear() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        let mut writer = TensorFileWriter::create(&path, [("a", &[4][..])], StoredDtype::BF16).unwrap();
        writer.write_range_f32("a", 0, &[1.0]).unwrap();
        assert_eq!(
            writer.finish().unwrap_err().to_string(),
            format!("`{}` is incomplete: 1 of 4 elements of tensor `a` were written", path.display())
        );
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn wrong_requests_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        let twice: [(&str, &[usize]); 2] = [("a", &[1]), ("a", &[1])];
        let error = TensorFileWriter::create(&path, twice, StoredDtype::F32).unwrap_err();
        assert!(matches!(error, TensorFileError::Duplicate { .. }));
        let mut writer = TensorFileWriter::create(&path, [("a", &[2][..])], StoredDtype::F32).unwrap();
        let error = writer.write_range_f32("a", 1, &[0.0; 2]).unwrap_err();
        assert!(matches!(error, TensorFileError::OutOfRange { start: 1, len: 2, elements: 2, .. }));
        let error = writer.write_range_f32("b", 0, &[]).unwrap_err();
        assert!(matches!(error, TensorFileError::NoTensor { .. }));
        let error = save_f32(&path, &[("__metadata__", &[1], &[0.0])]).unwrap_err().to_string();
        assert!(error.ends_with("no tensor in it can have the name `__metadata__`"), "{error}");
        let error = save_f32(&dir.path().join("no").join("w"), &[]).unwrap_err();
        assert!(matches!(error, TensorFileError::File(_)));
    }
}
