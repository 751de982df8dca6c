//! Checks the header of a GGUF file before candle reads it. Every size that the header announces is compared with the
//! length of the file and with fixed limits: a damaged or hostile file causes no large allocation.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use candle_core::quantized::GgmlDType;
use fsdp::files::{self, FileError};

use crate::error::PretrainedError;

/// Bytes of a key or of a tensor's name.
const MAX_NAME: u64 = 1 << 16;

/// Elements of all arrays together: several times what the largest known vocabulary needs. candle holds each in 32 bytes.
const MAX_ARRAY_ELEMENTS: u64 = 1 << 22;

/// Keys and tensors, each.
const MAX_ENTRIES: u64 = 1 << 20;

/// Arrays in arrays.
const MAX_DEPTH: usize = 4;

const MAX_DIMS: u32 = 4;

const MAX_ALIGNMENT: u32 = 1 << 16;

const STRING: u32 = 8;
const ARRAY: u32 = 9;
const U32: u32 = 4;

/// Element types that can be read, by their numbers in the format.
pub(super) fn dtype(number: u32) -> Option<GgmlDType> {
    Some(match number {
        0 => GgmlDType::F32,
        1 => GgmlDType::F16,
        2 => GgmlDType::Q4_0,
        3 => GgmlDType::Q4_1,
        6 => GgmlDType::Q5_0,
        7 => GgmlDType::Q5_1,
        8 => GgmlDType::Q8_0,
        10 => GgmlDType::Q2K,
        11 => GgmlDType::Q3K,
        12 => GgmlDType::Q4K,
        13 => GgmlDType::Q5K,
        14 => GgmlDType::Q6K,
        30 => GgmlDType::BF16,
        _ => return None,
    })
}

/// Walks the header and returns its length in bytes, the padding before the data not included.
pub(super) fn check(path: &Path) -> Result<u64, PretrainedError> {
    let file = files::open(path)?;
    let len = file.metadata().map_err(FileError::on("read", path))?.len();
    let mut walk =
        Walk { path: path.to_path_buf(), reader: BufReader::new(file), at: 0, len, array_elements: 0 };
    walk.header()?;
    Ok(walk.at)
}

struct Walk {
    path: PathBuf,
    reader: BufReader<File>,
    at: u64,
    len: u64,
    array_elements: u64,
}

impl Walk {
    fn header(&mut self) -> Result<(), PretrainedError> {
        if self.take("the magic")? != *b"GGUF" {
            return Err(self.malformed(0, "it does not begin with `GGUF`".into()));
        }
        let version = self.u32("the version")?;
        if version != 2 && version != 3 {
            return Err(self.malformed(4, format!("it is of version {version}: 2 and 3 can be read")));
        }
        let tensors = self.count("tensors", MAX_ENTRIES)?;
        let keys = self.count("keys", MAX_ENTRIES)?;
        let mut known = HashSet::new();
        for _ in 0..keys {
            let start = self.at;
            let key = self.name("a key")?;
            let kind = self.u32("the type of a value")?;
            if key == "general.alignment" {
                self.alignment(kind)?;
            } else {
                self.value(&key, kind, 0)?;
            }
            self.once(&mut known, key, start, "key")?;
        }
        let mut known = HashSet::new();
        for _ in 0..tensors {
            let start = self.at;
            let name = self.name("the name of a tensor")?;
            self.tensor(&name)?;
            self.once(&mut known, name, start, "tensor")?;
        }
        Ok(())
    }

    fn once(
        &self,
        known: &mut HashSet<String>,
        name: String,
        start: u64,
        what: &str,
    ) -> Result<(), PretrainedError> {
        if known.contains(&name) {
            return Err(self.malformed(start, format!("the {what} `{name}` comes twice")));
        }
        known.insert(name);
        Ok(())
    }

    fn alignment(&mut self, kind: u32) -> Result<(), PretrainedError> {
        let start = self.at;
        if kind != U32 {
            return Err(self.malformed(start, format!("`general.alignment` is of type {kind}, not {U32}")));
        }
        let alignment = self.u32("`general.alignment`")?;
        if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
            let reason =
                format!("data aligned to {alignment} bytes: expected a power of two up to {MAX_ALIGNMENT}");
            return Err(self.malformed(start, reason));
        }
        Ok(())
    }

    fn value(&mut self, key: &str, kind: u32, depth: usize) -> Result<(), PretrainedError> {
        let start = self.at;
        match kind {
            STRING => {
                let len = self.count("bytes of a string", u64::MAX)?;
                self.skip(len, "a string")
            }
            ARRAY => {
                if depth == MAX_DEPTH {
                    return Err(
                        self.malformed(start, format!("`{key}` nests arrays more than {MAX_DEPTH} deep"))
                    );
                }
                let kind = self.u32("the type of an array")?;
                let elements = self.count("elements of an array", MAX_ARRAY_ELEMENTS)?;
                self.array_elements += elements;
                if self.array_elements > MAX_ARRAY_ELEMENTS {
                    let reason =
                        format!("with `{key}` its arrays have more than {MAX_ARRAY_ELEMENTS} elements");
                    return Err(self.malformed(start, reason));
                }
                match scalar_size(kind) {
                    // Booleans are looked at one by one, as only 0 and 1 are any.
                    Some(size) if kind != 7 => self.skip(elements * size, "an array"),
                    _ => (0..elements).try_for_each(|_| self.value(key, kind, depth + 1)),
                }
            }
            7 => match self.take::<1>("a boolean")? {
                [0 | 1] => Ok(()),
                [other] => Err(self.malformed(start, format!("`{key}` has a boolean of {other}"))),
            },
            other => match scalar_size(other) {
                Some(size) => self.skip(size, "a value"),
                None => Err(self.malformed(start, format!("`{key}` is of the unknown type {other}"))),
            },
        }
    }

    fn tensor(&mut self, name: &str) -> Result<(), PretrainedError> {
        let start = self.at;
        let dims = self.u32("a number of dims")?;
        if dims > MAX_DIMS {
            return Err(self.malformed(start, format!("tensor `{name}` has {dims} dims: at most {MAX_DIMS}")));
        }
        let mut elements = Some(1u64);
        let mut row = 1;
        for dim in 0..dims {
            let size = self.u64("a dim")?;
            elements = elements.and_then(|elements| elements.checked_mul(size));
            // The innermost dim comes first.
            row = if dim == 0 { size } else { row };
        }
        // As f32, and in bytes, it must be countable.
        if elements.is_none_or(|elements| elements > (isize::MAX / 8) as u64) {
            return Err(self.malformed(start, format!("tensor `{name}` has too many elements to count")));
        }
        let place = self.at;
        let number = self.u32("an element type")?;
        let Some(dtype) = dtype(number) else {
            let reason = format!(
                "tensor `{name}` has elements of type {number}: expected F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 or \
                 Q2_K to Q6_K"
            );
            return Err(self.malformed(place, reason));
        };
        let block = dtype.block_size() as u64;
        if !row.is_multiple_of(block) {
            let reason = format!("tensor `{name}` has rows of {row} elements in blocks of {block}");
            return Err(self.malformed(start, reason));
        }
        self.u64("an offset")?;
        Ok(())
    }

    fn name(&mut self, what: &str) -> Result<String, PretrainedError> {
        let len = self.count("bytes of a name", MAX_NAME)?;
        let start = self.at;
        let mut bytes = vec![0; len as usize];
        self.read(&mut bytes, what)?;
        // What is no UTF-8 could become another name on its way through candle.
        let mut name =
            String::from_utf8(bytes).map_err(|_| self.malformed(start, format!("{what} is not UTF-8")))?;
        // As candle does.
        name.truncate(name.trim_end_matches('\0').len());
        Ok(name)
    }

    /// A number of things of at least one byte each.
    fn count(&mut self, what: &str, limit: u64) -> Result<u64, PretrainedError> {
        let start = self.at;
        let count = self.u64(what)?;
        let left = self.len - self.at;
        if count > left || count > limit {
            let limit = limit.min(left);
            return Err(
                self.malformed(start, format!("{count} {what} are announced: at most {limit} can be here"))
            );
        }
        Ok(count)
    }

    fn u32(&mut self, what: &str) -> Result<u32, PretrainedError> {
        Ok(u32::from_le_bytes(self.take(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, PretrainedError> {
        Ok(u64::from_le_bytes(self.take(what)?))
    }

    fn take<const N: usize>(&mut self, what: &str) -> Result<[u8; N], PretrainedError> {
        let mut bytes = [0; N];
        self.read(&mut bytes, what)?;
        Ok(bytes)
    }

    fn read(&mut self, bytes: &mut [u8], what: &str) -> Result<(), PretrainedError> {
        self.fits(bytes.len() as u64, what)?;
        self.reader.read_exact(bytes).map_err(FileError::on("read", &self.path))?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn skip(&mut self, bytes: u64, what: &str) -> Result<(), PretrainedError> {
        self.fits(bytes, what)?;
        // It fits into the file, so it fits an i64.
        self.reader.seek_relative(bytes as i64).map_err(FileError::on("read", &self.path))?;
        self.at += bytes;
        Ok(())
    }

    fn fits(&self, bytes: u64, what: &str) -> Result<(), PretrainedError> {
        if bytes > self.len - self.at {
            let reason = format!("{what} of {bytes} bytes goes past the end of the file at {}", self.len);
            return Err(self.malformed(self.at, reason));
        }
        Ok(())
    }

    fn malformed(&self, offset: u64, reason: String) -> PretrainedError {
        PretrainedError::Gguf { path: self.path.clone(), offset, reason }
    }
}

/// Bytes of a value of fixed size, by its type's number.
fn scalar_size(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}
