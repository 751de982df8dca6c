//! Reading ranges of named tensors.

use std::collections::BTreeMap;
use std::path::Path;

use half::{bf16, f16};
use safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};

use super::{FoundTensor, Mismatch, PositionedFile, StoredDtype, TensorFileError, said};

/// Elements converted at a time.
const CHUNK: usize = 1 << 16;

/// Limit of the format on its header.
const MAX_HEADER: u64 = 100_000_000;

/// An open safetensors file of which only the header is in memory. Threads may share it.
#[derive(Debug)]
pub struct TensorFile {
    file: PositionedFile,
    data_start: u64,
    tensors: BTreeMap<String, TensorInfo>,
}

impl TensorFile {
    /// Opens a file and checks its header and its length.
    ///
    /// # Errors
    /// It cannot be read, or is not a safetensors file.
    pub fn open(path: &Path) -> Result<Self, TensorFileError> {
        let malformed = |reason: String| TensorFileError::Malformed { path: path.to_path_buf(), reason };
        let file = PositionedFile::open(path)?;
        let length = file.len();
        if length < 8 {
            return Err(malformed(format!("{length} bytes are too short for a header")));
        }
        let mut size = [0; 8];
        file.read_at(0, &mut size)?;
        let header_size = u64::from_le_bytes(size);
        if header_size > MAX_HEADER || header_size > length - 8 {
            return Err(malformed(format!(
                "a header of {header_size} bytes is announced in a file of {length} bytes"
            )));
        }
        let mut header = vec![0; header_size as usize];
        file.read_at(8, &mut header)?;
        let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| malformed(said(error)))?;
        let data_start = 8 + header_size;
        let expected = data_start.saturating_add(metadata.data_len() as u64);
        if length != expected {
            return Err(malformed(format!("its header describes {expected} bytes, it has {length}")));
        }
        let tensors = metadata.tensors().into_iter().map(|(name, info)| (name, info.clone())).collect();
        Ok(Self { file, data_start, tensors })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Shape of a tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        Some(&self.info(name)?.shape)
    }

    /// It has a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Element type of a tensor as the file names it, such as `BF16`, whether it can be read here or not.
    pub fn dtype_name(&self, name: &str) -> Option<String> {
        Some(self.info(name)?.dtype.to_string())
    }

    /// Dtype, shape and place of a tensor.
    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// All tensors, sorted by name, to be held against a model's.
    pub fn found(&self) -> impl Iterator<Item = FoundTensor<'_>> {
        self.tensors.iter().map(|(name, info)| FoundTensor {
            name,
            shape: &info.shape,
            unreadable: Float::of(info.dtype).is_none().then(|| info.dtype.to_string()),
        })
    }

    /// How the file differs from a model's list of names and shapes.
    pub fn compare<'a>(&self, expected: impl IntoIterator<Item = (&'a str, &'a [usize])>) -> Mismatch {
        Mismatch::between(expected, self.found())
    }

    /// Fails unless the file holds exactly these tensors, in element types that
    /// [`read_range_f32`](Self::read_range_f32) reads.
    ///
    /// # Errors
    /// [`TensorFileError::Mismatch`] with everything that is missing, unexpected, of another shape or dtype.
    pub fn check<'a>(
        &self,
        expected: impl IntoIterator<Item = (&'a str, &'a [usize])>,
    ) -> Result<(), TensorFileError> {
        let mismatch = self.compare(expected);
        if mismatch.is_empty() {
            return Ok(());
        }
        Err(TensorFileError::Mismatch { path: self.path().to_path_buf(), mismatch: Box::new(mismatch) })
    }

    /// Reads elements `start..start + out.len()` of the flattened tensor, converted to `f32`.
    ///
    /// # Errors
    /// No such tensor, a range past its end, an element type other than F32, BF16, F16 and F64, or a failed
    /// read.
    pub fn read_range_f32(&self, name: &str, start: usize, out: &mut [f32]) -> Result<(), TensorFileError> {
        let info = self.range(name, start, out.len())?;
        let float = Float::of(info.dtype).ok_or_else(|| self.not_a_float(name, info.dtype))?;
        let mut bytes = vec![0; CHUNK.min(out.len()) * float.size()];
        let mut position = info.data_offsets.0 + start * float.size();
        for chunk in out.chunks_mut(CHUNK) {
            let bytes = &mut bytes[..chunk.len() * float.size()];
            self.read_at(position, bytes)?;
            float.widen(bytes, chunk);
            position += bytes.len();
        }
        Ok(())
    }

    /// Element type of a tensor; `None` if there is none of the name, or it is one that
    /// [`read_range_bytes`](Self::read_range_bytes) does not read.
    pub fn dtype(&self, name: &str) -> Option<StoredDtype> {
        StoredDtype::of(self.info(name)?.dtype)
    }

    /// Reads `len` elements of a flattened tensor from `start` on as they are, little-endian.
    ///
    /// # Errors
    /// No such tensor, a range past its end, an element type that is no [`StoredDtype`], or a failed read.
    pub fn read_range_bytes(&self, name: &str, start: usize, len: usize) -> Result<Vec<u8>, TensorFileError> {
        let info = self.range(name, start, len)?;
        let size = StoredDtype::of(info.dtype).map(StoredDtype::size);
        let size = size.ok_or_else(|| self.wrong_dtype(name, info.dtype, "floats or integers"))?;
        let mut bytes = vec![0; len * size];
        self.read_at(info.data_offsets.0 + start * size, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads elements `start..start + out.len()` of a flattened I32 tensor.
    ///
    /// # Errors
    /// No such tensor, a range past its end, another element type, or a failed read.
    pub fn read_range_i32(&self, name: &str, start: usize, out: &mut [i32]) -> Result<(), TensorFileError> {
        let info = self.range(name, start, out.len())?;
        if info.dtype != Dtype::I32 {
            return Err(self.wrong_dtype(name, info.dtype, "I32"));
        }
        self.read_at(info.data_offsets.0 + start * 4, bytemuck::cast_slice_mut(out))?;
        out.iter_mut().for_each(|id| *id = i32::from_le(*id));
        Ok(())
    }

    fn range(&self, name: &str, start: usize, len: usize) -> Result<&TensorInfo, TensorFileError> {
        let Some(info) = self.info(name) else {
            return Err(TensorFileError::NoTensor { path: self.path().to_path_buf(), name: name.to_owned() });
        };
        // The header was checked when the file was opened: the product does not overflow.
        let elements = info.shape.iter().product();
        if start.checked_add(len).is_none_or(|end| end > elements) {
            let (path, name) = (self.path().to_path_buf(), name.to_owned());
            return Err(TensorFileError::OutOfRange { path, name, start, len, elements });
        }
        Ok(info)
    }

    fn read_at(&self, position: usize, bytes: &mut [u8]) -> Result<(), TensorFileError> {
        Ok(self.file.read_at(self.data_start + position as u64, bytes)?)
    }

    fn not_a_float(&self, name: &str, found: Dtype) -> TensorFileError {
        self.wrong_dtype(name, found, "F32, BF16, F16 or F64")
    }

    fn wrong_dtype(&self, name: &str, found: Dtype, expected: &'static str) -> TensorFileError {
        let (path, name) = (self.path().to_path_buf(), name.to_owned());
        TensorFileError::Dtype { path, name, found: found.to_string(), expected }
    }
}

/// An element type that can be read as `f32`.
#[derive(Clone, Copy)]
enum Float {
    F32,
    BF16,
    F16,
    F64,
}

impl Float {
    fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(Float::F32),
            Dtype::BF16 => Some(Float::BF16),
            Dtype::F16 => Some(Float::F16),
            Dtype::F64 => Some(Float::F64),
            _ => None,
        }
    }

    fn size(self) -> usize {
        match self {
            Float::BF16 | Float::F16 => 2,
            Float::F32 => 4,
            Float::F64 => 8,
        }
    }

    /// Converts little-endian elements.
    fn widen(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Float::F32 => each(bytes, out, f32::from_le_bytes),
            Float::BF16 => each(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
            Float::F16 => each(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
            Float::F64 => each(bytes, out, |b| f64::from_le_bytes(b) as f32),
        }
    }
}

fn each<const N: usize>(bytes: &[u8], out: &mut [f32], convert: impl Fn([u8; N]) -> f32) {
    let (elements, _) = bytes.as_chunks::<N>();
    for (value, &element) in out.iter_mut().zip(elements) {
        *value = convert(element);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use safetensors::tensor::TensorView;

    use super::*;

    fn write(path: &Path, tensors: &[(&str, Dtype, &[usize], Vec<u8>)]) {
        let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
            (*name, TensorView::new(*dtype, shape.to_vec(), bytes).unwrap())
        });
        safetensors::serialize_to_file(views, None, path).unwrap();
    }

    fn bytes<T, const N: usize>(
        values: &[f32],
        convert: impl Fn(f32) -> T,
        le: impl Fn(T) -> [u8; N],
    ) -> Vec<u8> {
        values.iter().flat_map(|&v| le(convert(v))).collect()
    }

    #[test]
    fn ranges_of_every_float_type_are_widened() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        let values: Vec<f32> = (0..12).map(|i| i as f32 * 0.5 - 2.0).collect();
        write(
            &path,
            &[
                ("f32", Dtype::F32, &[3, 4], bytes(&values, |v| v, f32::to_le_bytes)),
                ("bf16", Dtype::BF16, &[12], bytes(&values, bf16::from_f32, bf16::to_le_bytes)),
                ("f16", Dtype::F16, &[2, 6], bytes(&values, f16::from_f32, f16::to_le_bytes)),
                ("f64", Dtype::F64, &[12, 1], bytes(&values, f64::from, f64::to_le_bytes)),
            ],
        );
        let file = TensorFile::open(&path).unwrap();
        assert_eq!(file.names().collect::<Vec<_>>(), ["bf16", "f16", "f32", "f64"]);
        assert_eq!(file.shape("f16"), Some(&[2usize, 6][..]));
        for name in ["f32", "bf16", "f16", "f64"] {
            let mut out = [0.0; 5];
            file.read_range_f32(name, 3, &mut out).unwrap();
            assert_eq!(out, values[3..8], "{name}");
            file.read_range_f32(name, 12, &mut []).unwrap();
        }
    }

    #[test]
    fn a_range_longer_than_a_chunk_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        let values: Vec<f32> = (0..2 * CHUNK + 7).map(|i| i as f32).collect();
        write(&path, &[("w", Dtype::F32, &[values.len()], bytes(&values, |v| v, f32::to_le_bytes))]);
        let file = TensorFile::open(&path).unwrap();
        let mut out = vec![0.0; values.len() - 1];
        file.read_range_f32("w", 1, &mut out).unwrap();
        assert_eq!(out, values[1..]);
    }

    #[test]
    fn all_differences_are_reported_together() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        write(
            &path,
            &[
                ("a", Dtype::F32, &[2], vec![0; 8]),
                ("b", Dtype::F32, &[2, 1], vec![0; 8]),
                ("z", Dtype::F32, &[1], vec![0; 4]),
            ],
        );
        let file = TensorFile::open(&path).unwrap();
        let model: [(&str, &[usize]); 4] = [("d", &[1]), ("c", &[1]), ("b", &[1, 2]), ("a", &[2])];
        assert_eq!(
            file.check(model).unwrap_err().to_string(),
            format!(
                "`{}` does not fit the model:\n  2 missing: d, c\n  1 unexpected: z\n  1 of another shape: b (model \
                 [1, 2], file [2, 1])",
                path.display()
            )
        );
        file.check([("a", &[2][..]), ("b", &[2, 1][..]), ("z", &[1][..])]).unwrap();
    }

    #[test]
    fn wrong_requests_name_the_tensor_and_the_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        write(&path, &[("a", Dtype::F32, &[2], vec![0; 8]), ("i", Dtype::I64, &[1], vec![0; 8])]);
        let file = TensorFile::open(&path).unwrap();
        let at = path.display();
        let message =
            |name: &str, start| file.read_range_f32(name, start, &mut [0.0; 2]).unwrap_err().to_string();
        assert_eq!(
            message("a", 1),
            format!("elements 1..3 of tensor `a` in `{at}` were asked for: it has 2")
        );
        assert!(message("a", usize::MAX).ends_with("it has 2"));
        assert_eq!(message("b", 0), format!("`{at}` has no tensor `b`"));
        let mut one = [0.0];
        assert_eq!(
            file.read_range_f32("i", 0, &mut one).unwrap_err().to_string(),
            format!("tensor `i` in `{at}` is I64: expected F32, BF16, F16 or F64")
        );
        let names: [(&str, &[usize]); 2] = [("a", &[2]), ("i", &[1])];
        let Err(TensorFileError::Mismatch { mismatch, .. }) = file.check(names) else {
            panic!("integers are not read as floats")
        };
        assert_eq!(mismatch.dtypes.iter().map(|wrong| wrong.name.as_str()).collect::<Vec<_>>(), ["i"]);
    }

    #[test]
    fn broken_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        write(&path, &[("a", Dtype::F32, &[2], vec![0; 8])]);
        let whole = fs::read(&path).unwrap();
        let mut huge = whole.clone();
        huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
        let mut garbled = whole.clone();
        garbled[8] = b'x';
        let mut overlong = whole.clone();
        overlong.push(0);
        for broken in
            [&b""[..], &whole[..5], &whole[..20], &whole[..whole.len() - 1], &huge, &garbled, &overlong]
        {
            fs::write(&path, broken).unwrap();
            let message = TensorFile::open(&path).unwrap_err().to_string();
            let expected = format!("`{}` is not a valid safetensors file: ", path.display());
            assert!(message.starts_with(&expected), "{message}");
        }
        let absent = dir.path().join("absent");
        assert!(matches!(TensorFile::open(&absent), Err(TensorFileError::File(_))));
    }
}
