//! Element types of tensors in files.

use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use crate::spec;

/// Element type of a stored tensor, named as in safetensors files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum StoredDtype {
    F32,
    BF16,
    F16,
    F64,
    U8,
    U32,
    I16,
    I32,
    I64,
}

impl StoredDtype {
    /// Bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            StoredDtype::U8 => 1,
            StoredDtype::BF16 | StoredDtype::F16 | StoredDtype::I16 => 2,
            StoredDtype::F32 | StoredDtype::U32 | StoredDtype::I32 => 4,
            StoredDtype::F64 | StoredDtype::I64 => 8,
        }
    }

    /// As in safetensors files: `F32`, `BF16`, ...
    pub const fn name(self) -> &'static str {
        match self {
            StoredDtype::F32 => "F32",
            StoredDtype::BF16 => "BF16",
            StoredDtype::F16 => "F16",
            StoredDtype::F64 => "F64",
            StoredDtype::U8 => "U8",
            StoredDtype::U32 => "U32",
            StoredDtype::I16 => "I16",
            StoredDtype::I32 => "I32",
            StoredDtype::I64 => "I64",
        }
    }

    /// Its elements are floats.
    pub const fn is_float(self) -> bool {
        matches!(self, StoredDtype::F32 | StoredDtype::BF16 | StoredDtype::F16 | StoredDtype::F64)
    }

    /// That of a tensor in a safetensors file; `None` if it is one that is not read here.
    pub(crate) const fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(StoredDtype::F32),
            Dtype::BF16 => Some(StoredDtype::BF16),
            Dtype::F16 => Some(StoredDtype::F16),
            Dtype::F64 => Some(StoredDtype::F64),
            Dtype::U8 => Some(StoredDtype::U8),
            Dtype::U32 => Some(StoredDtype::U32),
            Dtype::I16 => Some(StoredDtype::I16),
            Dtype::I32 => Some(StoredDtype::I32),
            Dtype::I64 => Some(StoredDtype::I64),
            _ => None,
        }
    }

    pub(crate) const fn safetensors(self) -> Dtype {
        match self {
            StoredDtype::F32 => Dtype::F32,
            StoredDtype::BF16 => Dtype::BF16,
            StoredDtype::F16 => Dtype::F16,
            StoredDtype::F64 => Dtype::F64,
            StoredDtype::U8 => Dtype::U8,
            StoredDtype::U32 => Dtype::U32,
            StoredDtype::I16 => Dtype::I16,
            StoredDtype::I32 => Dtype::I32,
            StoredDtype::I64 => Dtype::I64,
        }
    }
}

impl std::fmt::Display for StoredDtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl From<spec::Dtype> for StoredDtype {
    fn from(dtype: spec::Dtype) -> Self {
        match dtype {
            spec::Dtype::F32 => StoredDtype::F32,
            spec::Dtype::BF16 => StoredDtype::BF16,
            spec::Dtype::F16 => StoredDtype::F16,
        }
    }
}
