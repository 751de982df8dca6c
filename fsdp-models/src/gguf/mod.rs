//! Reads GGUF files of Llamas by ranges of elements, and dequantises them block by block.

mod header;
mod metadata;
mod names;
mod rotary;

use std::collections::BTreeMap;
use std::io::{Cursor, Read};
use std::ops::Range;
use std::path::Path;

use candle_core::Device;
use candle_core::quantized::gguf_file::Content;
use candle_core::quantized::{GgmlDType, ggml_file::qtensor_from_ggml};
use fsdp::files::{self, FileError, FoundTensor, PositionedFile};
use half::{bf16, f16};

use crate::config::LlamaConfig;
use crate::error::PretrainedError;
use metadata::Metadata;
use names::{Rotary, translate};

/// Elements dequantised at a time: a multiple of every block size.
const CHUNK: usize = 1 << 16;

/// An open GGUF file of a Llama, of which only the list of tensors is in memory. Threads may share it.
///
/// Tensors have Hugging Face's names, shapes and order of rows: llama.cpp keeps the rows of the query and key projections
/// in the order of its rotary embedding, pairs side by side, which is undone here.
#[derive(Debug)]
pub struct GgufFile {
    file: PositionedFile,
    tensors: BTreeMap<String, GgufTensor>,
    config: LlamaConfig,
}

#[derive(Debug)]
struct GgufTensor {
    dtype: GgmlDType,
    shape: Vec<usize>,
    /// Of its first byte in the file.
    offset: u64,
    /// Rows of a head, where the rows of each are in rotary order.
    head_rows: Option<usize>,
}

impl GgufTensor {
    fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    fn row(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    fn bytes(&self, elements: usize) -> usize {
        elements / self.dtype.block_size() * self.dtype.type_size()
    }
}

/// Whether a file begins as a GGUF file does, or has the name of one.
pub(crate) fn is_gguf(path: &Path) -> Result<bool, FileError> {
    let mut file = files::open(path)?;
    let mut magic = [0; 4];
    let named = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    Ok(named || (file.read_exact(&mut magic).is_ok() && magic == *b"GGUF"))
}

/// Reads the header of a GGUF file: its metadata and where its tensors are.
pub(crate) fn read_content(path: &Path) -> Result<(PositionedFile, Content), PretrainedError> {
    let len = header::check(path)?;
    let file = PositionedFile::open(path)?;
    let mut bytes = vec![0; len as usize];
    file.read_at(0, &mut bytes)?;
    let content = Content::read(&mut Cursor::new(bytes));
    let content = content.map_err(|error| PretrainedError::Gguf {
        path: path.to_path_buf(),
        offset: 0,
        reason: format!("its header cannot be read: {error}"),
    })?;
    Ok((file, content))
}

impl GgufFile {
    /// Opens a file and checks that it describes a Llama and holds all that its header announces.
    ///
    /// # Errors
    /// It cannot be read, is no GGUF file of version 2 or 3, ends early, holds element types that cannot be read, or
    /// is of another architecture or a variant of Llama that is not implemented, or has settings that are not known here, all of
    /// which are named.
    pub fn open(path: &Path) -> Result<Self, PretrainedError> {
        let (file, content) = read_content(path)?;
        let metadata = Metadata { path, values: &content.metadata };
        let embedding = content.tensor_infos.get("token_embd.weight");
        let vocab_size = embedding.map_or(0, |info| info.shape.dims().first().copied().unwrap_or(0));
        let tied = !content.tensor_infos.contains_key("output.weight");
        let mut config = metadata.config(vocab_size, tied)?;
        config.validate().map_err(|error| PretrainedError::Metadata {
            path: path.to_path_buf(),
            key: "general.architecture".into(),
            reason: format!("is `llama`, but {error}"),
        })?;
        if let Some(info) = content.tensor_infos.get(rotary::DIVISORS) {
            let start = content.tensor_data_offset.saturating_add(info.offset);
            config.rope_scaling = rotary::scaling(&file, info, start, &config)?;
        }
        let mut tensors = BTreeMap::new();
        // The divisors of frequencies are a setting of the model, none of its parameters.
        let mut infos: Vec<_> =
            content.tensor_infos.iter().filter(|(name, _)| *name != rotary::DIVISORS).collect();
        // In the order of the file: what is wrong first is always the same.
        infos.sort_by_key(|(name, info)| (info.offset, name.as_str()));
        for (name, info) in infos {
            let (known, rotary) = translate(name).unwrap_or_else(|| (name.clone(), None));
            let tensor = GgufTensor {
                dtype: info.ggml_dtype,
                shape: info.shape.dims().to_vec(),
                offset: content.tensor_data_offset.saturating_add(info.offset),
                head_rows: rotary.map(|_| config.head_dim()),
            };
            let bytes = tensor.bytes(tensor.elements()) as u64;
            let malformed =
                |reason| PretrainedError::Gguf { path: path.to_path_buf(), offset: tensor.offset, reason };
            if tensor.offset.checked_add(bytes).is_none_or(|end| end > file.len()) {
                let len = file.len();
                return Err(malformed(format!(
                    "tensor `{name}` of {bytes} bytes goes past the end of the file at {len}"
                )));
            }
            if let Some(rotary) = rotary {
                let heads = match rotary {
                    Rotary::Queries => config.num_attention_heads,
                    Rotary::Keys => config.num_key_value_heads,
                };
                let rows = heads * config.head_dim();
                if tensor.shape.len() != 2 || tensor.shape[0] != rows {
                    let shape = &tensor.shape;
                    return Err(malformed(format!(
                        "tensor `{name}` has shape {shape:?}: expected {rows} rows"
                    )));
                }
            }
            if tensors.contains_key(&known) {
                return Err(malformed(format!("tensor `{name}` is another one of the name `{known}`")));
            }
            tensors.insert(known, tensor);
        }
        Ok(GgufFile { file, tensors, config })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The model that it is of. The head is tied if the file has none.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// All tensors under Hugging Face's names, those that have none under llama.cpp's, sorted by name.
    pub fn found(&self) -> impl Iterator<Item = FoundTensor<'_>> {
        self.tensors.iter().map(|(name, tensor)| FoundTensor { name, shape: &tensor.shape, unreadable: None })
    }

    /// Dims of a tensor, outermost first.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        Some(&self.tensors.get(name)?.shape)
    }

    /// How a tensor is stored.
    pub fn dtype(&self, name: &str) -> Option<GgmlDType> {
        Some(self.tensors.get(name)?.dtype)
    }

    /// Reads elements `start..start + out.len()` of a flattened tensor, dequantised.
    ///
    /// # Errors
    /// No such tensor, a range past its end, or a failed read.
    pub fn read_range_f32(&self, name: &str, start: usize, out: &mut [f32]) -> Result<(), PretrainedError> {
        let tensor = self.tensors.get(name);
        let tensor = tensor.ok_or_else(|| self.refused(name, "is not in the file".into()))?;
        let elements = tensor.elements();
        let end = start.checked_add(out.len()).filter(|&end| end <= elements).ok_or_else(|| {
            let len = out.len();
            self.refused(name, format!("has {elements} elements: {len} from {start} on were asked for"))
        })?;
        match tensor.head_rows {
            Some(head_rows) => self.read_heads(tensor, head_rows, start..end, out),
            None => self.read_stored(tensor, start, out),
        }
    }

    /// Reads head by head and puts the rows of each in order: of `2h` rows, row `i` of half `s` is stored at `2i + s`.
    fn read_heads(
        &self,
        tensor: &GgufTensor,
        head_rows: usize,
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), PretrainedError> {
        let row = tensor.row();
        let head = head_rows * row;
        if range.is_empty() {
            return Ok(());
        }
        let mut stored = vec![0.0; head];
        for index in range.start / head..range.end.div_ceil(head) {
            let base = index * head;
            self.read_stored(tensor, base, &mut stored)?;
            for at in 0..head_rows {
                let (half, pair) = (at / (head_rows / 2), at % (head_rows / 2));
                let source = (2 * pair + half) * row;
                let first = base + at * row;
                let (from, to) = (first.max(range.start), (first + row).min(range.end));
                if from < to {
                    out[from - range.start..to - range.start]
                        .copy_from_slice(&stored[source + from - first..source + to - first]);
                }
            }
        }
        Ok(())
    }

    /// Reads elements in the order of the file.
    fn read_stored(&self, tensor: &GgufTensor, start: usize, out: &mut [f32]) -> Result<(), PretrainedError> {
        let block = tensor.dtype.block_size();
        let (mut at, mut filled) = (start, 0);
        let mut bytes = Vec::new();
        while filled < out.len() {
            // Whole blocks, of which the first and the last may hold more than is wanted.
            let first = at / block * block;
            let last = (at + out.len() - filled).next_multiple_of(block).min(first + CHUNK);
            bytes.resize(tensor.bytes(last - first), 0);
            let offset = tensor.offset + tensor.bytes(first) as u64;
            self.file.read_at(offset, &mut bytes)?;
            let wanted = (last - at).min(out.len() - filled);
            let out = &mut out[filled..filled + wanted];
            decode(tensor.dtype, &bytes, last - first, at - first, out).map_err(|error| {
                PretrainedError::Gguf {
                    path: self.path().to_path_buf(),
                    offset,
                    reason: format!("blocks of {:?} cannot be dequantised: {error}", tensor.dtype),
                }
            })?;
            at += wanted;
            filled += wanted;
        }
        Ok(())
    }

    /// Reads elements in the order of the file and as they are stored: whole blocks.
    pub(super) fn read_blocks(
        &self,
        name: &str,
        start: usize,
        len: usize,
    ) -> Result<Vec<u8>, PretrainedError> {
        let tensor = self.tensors.get(name);
        let tensor = tensor.ok_or_else(|| self.refused(name, "is not in the file".into()))?;
        let mut bytes = vec![0; tensor.bytes(len)];
        self.file.read_at(tensor.offset + tensor.bytes(start) as u64, &mut bytes)?;
        Ok(bytes)
    }

    fn refused(&self, name: &str, reason: String) -> PretrainedError {
        PretrainedError::Metadata { path: self.path().to_path_buf(), key: name.to_owned(), reason }
    }
}

/// The values of whole blocks, from the one at `skip` on.
fn decode(
    dtype: GgmlDType,
    bytes: &[u8],
    elements: usize,
    skip: usize,
    out: &mut [f32],
) -> candle_core::Result<()> {
    fn each<const N: usize>(bytes: &[u8], out: &mut [f32], convert: impl Fn([u8; N]) -> f32) {
        let (values, _) = bytes.as_chunks::<N>();
        for (out, &value) in out.iter_mut().zip(values) {
            *out = convert(value);
        }
    }
    match dtype {
        GgmlDType::F32 => each(bytes, out, f32::from_le_bytes),
        GgmlDType::F16 => each(bytes, out, |bytes| f16::from_le_bytes(bytes).to_f32()),
        GgmlDType::BF16 => each(bytes, out, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        _ => {
            let blocks = qtensor_from_ggml(dtype, bytes, vec![elements], &Device::Cpu)?;
            let values = blocks.dequantize(&Device::Cpu)?.to_vec1::<f32>()?;
            out.copy_from_slice(&values[skip..skip + out.len()]);
        }
    }
    Ok(())
}
