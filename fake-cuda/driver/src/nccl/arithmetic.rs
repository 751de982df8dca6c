//! Values of NCCL's types, and how they are reduced.

use std::ffi::c_int;

use half::{bf16, f16};

use super::redop::{RedOp, Reduction};
use crate::abi::{In, Null};

/// `ncclDataType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    Bf16,
    F8E4M3,
    F8E5M2,
}

/// A value while it is reduced.
#[derive(Clone, Copy, Debug)]
pub enum Value {
    Integer(i128),
    Float(f64),
}

impl Type {
    pub fn find(dtype: c_int) -> Option<Self> {
        use Type::{Bf16, F8E4M3, F8E5M2, F16, F32, F64, I8, I32, I64, U8, U32, U64};
        let all = [I8, U8, I32, U32, I64, U64, F16, F32, F64, Bf16, F8E4M3, F8E5M2];
        usize::try_from(dtype).ok().and_then(|index| all.get(index).copied())
    }

    pub fn bytes(self) -> usize {
        match self {
            Type::I8 | Type::U8 | Type::F8E4M3 | Type::F8E5M2 => 1,
            Type::F16 | Type::Bf16 => 2,
            Type::I32 | Type::U32 | Type::F32 => 4,
            Type::I64 | Type::U64 | Type::F64 => 8,
        }
    }

    /// Whether values can be reduced; those of 8-bit floats are only moved.
    pub fn is_reducible(self) -> bool {
        !matches!(self, Type::F8E4M3 | Type::F8E5M2)
    }

    pub fn read(self, at: &In<u8>) -> Result<Value, Null> {
        Ok(match self {
            Type::I8 => Value::Integer(at.cast::<i8>().get(0)?.into()),
            Type::U8 | Type::F8E4M3 | Type::F8E5M2 => Value::Integer(at.get(0)?.into()),
            Type::I32 => Value::Integer(at.cast::<i32>().get(0)?.into()),
            Type::U32 => Value::Integer(at.cast::<u32>().get(0)?.into()),
            Type::I64 => Value::Integer(at.cast::<i64>().get(0)?.into()),
            Type::U64 => Value::Integer(at.cast::<u64>().get(0)?.into()),
            Type::F16 => Value::Float(at.cast::<f16>().get(0)?.into()),
            Type::Bf16 => Value::Float(at.cast::<bf16>().get(0)?.into()),
            Type::F32 => Value::Float(at.cast::<f32>().get(0)?.into()),
            Type::F64 => Value::Float(at.cast::<f64>().get(0)?),
        })
    }

    /// The bytes of a value; integers wrap.
    pub fn to_bytes(self, value: Value) -> Vec<u8> {
        let (integer, float) = match value {
            Value::Integer(integer) => (integer, integer as f64),
            Value::Float(float) => (float as i128, float),
        };
        match self {
            Type::I8 | Type::U8 | Type::F8E4M3 | Type::F8E5M2 => vec![integer as u8],
            Type::I32 | Type::U32 => (integer as u32).to_ne_bytes().to_vec(),
            Type::I64 | Type::U64 => (integer as u64).to_ne_bytes().to_vec(),
            Type::F16 => f16::from_f64(float).to_ne_bytes().to_vec(),
            Type::Bf16 => bf16::from_f64(float).to_ne_bytes().to_vec(),
            Type::F32 => (float as f32).to_ne_bytes().to_vec(),
            Type::F64 => float.to_ne_bytes().to_vec(),
        }
    }

    /// Floats narrower than f64 are summed in f32: a sum of two in f64, rounded, is the sum in f32.
    fn round(self, value: Value) -> Value {
        match value {
            Value::Float(float) if self != Type::F64 => Value::Float(f64::from(float as f32)),
            value => value,
        }
    }

    /// Reduces the ranks' values, in the order of the ranks.
    pub fn reduce(self, values: &[Value], scales: &[Option<Value>], op: Reduction) -> Value {
        let scaled = values.iter().zip(scales).map(|(value, scale)| match scale {
            Some(scale) => self.round(combine(*value, *scale, |a, b| a.wrapping_mul(b), |a, b| a * b)),
            None => *value,
        });
        let total = scaled.reduce(|a, b| {
            self.round(match op {
                Reduction::Sum | Reduction::Average | Reduction::Made(_) => {
                    combine(a, b, |a, b| a.wrapping_add(b), |a, b| a + b)
                }
                Reduction::Product => combine(a, b, |a, b| a.wrapping_mul(b), |a, b| a * b),
                Reduction::Max => combine(a, b, |a, b| a.max(b), f64::max),
                Reduction::Min => combine(a, b, |a, b| a.min(b), f64::min),
            })
        });
        let total = total.unwrap_or(Value::Integer(0));
        match op {
            Reduction::Average => {
                let ranks = values.len();
                self.round(combine(total, Value::Integer(ranks as i128), |a, b| a / b, |a, b| a / b))
            }
            _ => total,
        }
    }
}

fn combine(a: Value, b: Value, integers: fn(i128, i128) -> i128, floats: fn(f64, f64) -> f64) -> Value {
    match (a, b) {
        (Value::Integer(a), Value::Integer(b)) => Value::Integer(integers(a, b)),
        (Value::Float(a), Value::Integer(b)) => Value::Float(floats(a, b as f64)),
        (Value::Integer(a), Value::Float(b)) => Value::Float(floats(a as f64, b)),
        (Value::Float(a), Value::Float(b)) => Value::Float(floats(a, b)),
    }
}

impl Reduction {
    /// What a rank's values are scaled by.
    pub fn scale(self) -> Option<Value> {
        match self {
            Reduction::Made(RedOp::Scale(value)) => Some(value),
            Reduction::Made(RedOp::ScaleAt(address, dtype)) => dtype.read(&In::at(address)).ok(),
            _ => None,
        }
    }
}
