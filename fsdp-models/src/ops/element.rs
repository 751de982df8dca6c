//! The dtypes of ops: f32, and bf16 and f16, which are computed in f32.

use std::borrow::Cow;

use candle_core::WithDType;
use half::{bf16, f16};

use super::simd::{filled_by, vectorise};

/// A floating dtype that widens to f32 exactly and is rounded to nearest even from it.
pub(super) trait Element: WithDType {
    /// The values in f32: borrowed where they are f32 already.
    fn widen(values: &[Self]) -> Cow<'_, [f32]>;

    /// The values rounded to this dtype.
    fn narrow(values: Vec<f32>) -> Vec<Self>;

    /// The values rounded to this dtype and widened again: the same vector where they are f32 already.
    fn round_all(values: Vec<f32>) -> Vec<f32> {
        Self::widen(&Self::narrow(values)).into_owned()
    }

    /// One value rounded to this dtype and widened again.
    fn round(value: f32) -> f32;
}

impl Element for f32 {
    fn widen(values: &[f32]) -> Cow<'_, [f32]> {
        Cow::Borrowed(values)
    }

    fn narrow(values: Vec<f32>) -> Vec<f32> {
        values
    }

    fn round_all(values: Vec<f32>) -> Vec<f32> {
        values
    }

    #[inline(always)]
    fn round(value: f32) -> f32 {
        value
    }
}

/// `half`'s own conversion branches on NaN; this one selects, so that loops over it vectorise.
#[inline(always)]
fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    let quiet_nan = bits | 0x0040_0000;
    ((if value.is_nan() { quiet_nan } else { rounded }) >> 16) as u16
}

impl Element for bf16 {
    fn widen(values: &[bf16]) -> Cow<'_, [f32]> {
        // SAFETY: both slices have the same length, so the loop writes each element.
        Cow::Owned(unsafe {
            filled_by(values.len(), |wide| {
                vectorise(
                    #[inline(always)]
                    || {
                        for (wide, value) in wide.iter_mut().zip(values) {
                            wide.write(f32::from_bits(u32::from(value.to_bits()) << 16));
                        }
                    },
                )
            })
        })
    }

    fn narrow(values: Vec<f32>) -> Vec<bf16> {
        // SAFETY: as above.
        unsafe {
            filled_by(values.len(), |narrow| {
                vectorise(
                    #[inline(always)]
                    || {
                        for (narrow, value) in narrow.iter_mut().zip(&values) {
                            narrow.write(bf16::from_bits(bf16_bits(*value)));
                        }
                    },
                )
            })
        }
    }

    #[inline(always)]
    fn round(value: f32) -> f32 {
        f32::from_bits(u32::from(bf16_bits(value)) << 16)
    }
}

impl Element for f16 {
    fn widen(values: &[f16]) -> Cow<'_, [f32]> {
        Cow::Owned(values.iter().map(|v| v.to_f32()).collect())
    }

    fn narrow(values: Vec<f32>) -> Vec<f16> {
        values.into_iter().map(f16::from_f32).collect()
    }

    #[inline(always)]
    fn round(value: f32) -> f32 {
        f16::from_f32(value).to_f32()
    }
}

/// Runs `$body` with the type `$t` standing for the candle dtype `$dtype`, or fails naming `$op`.
macro_rules! with_element {
    ($op:expr, $dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $t = f32;
                $body
            }
            candle_core::DType::BF16 => {
                type $t = half::bf16;
                $body
            }
            candle_core::DType::F16 => {
                type $t = half::f16;
                $body
            }
            other => candle_core::bail!("{}: expected f32, bf16 or f16, got {}", $op, other.as_str()),
        }
    };
}
pub(super) use with_element;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounding_is_that_of_half() {
        for high in 0..=u16::MAX {
            for low in [0u16, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits((u32::from(high) << 16) | u32::from(low));
                let (ours, theirs) = (bf16::from_bits(bf16_bits(value)), bf16::from_f32(value));
                assert!(
                    ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()),
                    "{value:e}: {ours} and {theirs}"
                );
            }
        }
    }

    #[test]
    fn widening_is_exact() {
        let values: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).filter(|v| !v.is_nan()).collect();
        assert!(bf16::widen(&values).iter().zip(&values).all(|(w, v)| *w == v.to_f32()));
        assert_eq!(bf16::narrow(bf16::widen(&values).into_owned()), values);
    }
}
