//! Numbers for tests, and how close results must be.

use fsdp_kernels::Dtype;
use half::{bf16, f16};

/// The bits of a value rounded to a 16-bit dtype.
pub fn narrowed(dtype: Dtype, value: f32) -> u16 {
    match dtype {
        Dtype::BF16 => bf16::from_f32(value).to_bits(),
        _ => f16::from_f32(value).to_bits(),
    }
}

/// The value of the bits of a 16-bit dtype.
pub fn widened(dtype: Dtype, bits: u16) -> f32 {
    match dtype {
        Dtype::BF16 => bf16::from_bits(bits).to_f32(),
        _ => f16::from_bits(bits).to_f32(),
    }
}

/// The value as the dtype has it.
pub fn rounded(dtype: Dtype, value: f32) -> f32 {
    if dtype == Dtype::F32 { value } else { widened(dtype, narrowed(dtype, value)) }
}

/// Reproducible values of the dtype: both signs, magnitudes from 0.003 to 5.
pub fn values(dtype: Dtype, n: usize, salt: u32) -> Vec<f32> {
    (0..n as u32)
        .map(|i| {
            let hash = (i ^ salt.wrapping_mul(0x9e37_79b9)).wrapping_mul(2_654_435_761).rotate_left(13);
            let unit = hash.wrapping_mul(2_246_822_519) as f32 / u32::MAX as f32;
            rounded(dtype, (unit - 0.5) * 10f32.powi((hash % 4) as i32 - 2))
        })
        .collect()
}

pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| x.into()).collect()
}

/// The largest relative error of rounding to the dtype.
fn unit(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 2f64.powi(-24),
        Dtype::BF16 => 2f64.powi(-8),
        Dtype::F16 => 2f64.powi(-11),
    }
}

/// The largest error of rounding to a subnormal number of the dtype.
fn subnormal_unit(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 2f64.powi(-150),
        Dtype::BF16 => 2f64.powi(-134),
        Dtype::F16 => 2f64.powi(-25),
    }
}

/// Fails unless `got`, of this dtype, is `want` but for `roundings` roundings to it and an error of `f32_units` units
/// of f32 in terms as large as `magnitude`.
#[track_caller]
pub fn assert_close(got: f32, want: f64, dtype: Dtype, roundings: f64, f32_units: f64, magnitude: f64) {
    let bound = roundings * (unit(dtype) * want.abs() + subnormal_unit(dtype))
        + f32_units * unit(Dtype::F32) * magnitude.abs();
    let error = (f64::from(got) - want).abs();
    assert!(error <= bound, "{got} is not {want}: error {error:e}, allowed {bound:e}");
}

/// Lengths around those of packs, warps, blocks and a block's turn.
pub const LENGTHS: [usize; 16] = [0, 1, 3, 4, 5, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 2051, 4100];
