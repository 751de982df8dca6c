//! Slices of any float dtype, read and changed as f32.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::Slice;
use crate::spec::Dtype;

/// Calls `read` with the values of `slice`: where they are, or widened.
///
/// # Safety
/// As for [`Slice::as_slice`], for the length of the call.
pub unsafe fn read_f32<R>(slice: &Slice, read: impl FnOnce(&[f32]) -> R) -> R {
    // SAFETY: the caller's promise; the types are matched to the dtypes.
    unsafe {
        match slice.dtype() {
            Dtype::F32 => read(slice.as_slice::<f32>()),
            Dtype::BF16 => read(&slice.as_slice::<bf16>().to_f32_vec()),
            Dtype::F16 => read(&slice.as_slice::<f16>().to_f32_vec()),
        }
    }
}

/// Calls `update` with the values of `slice`, to be changed: where they are, or widened and afterwards rounded to
/// nearest even.
///
/// # Safety
/// As for [`Slice::as_mut_slice`], for the length of the call.
pub unsafe fn update_f32<R>(slice: &Slice, update: impl FnOnce(&mut [f32]) -> R) -> R {
    // SAFETY: the caller's promise; the types are matched to the dtypes.
    unsafe {
        match slice.dtype() {
            Dtype::F32 => update(slice.as_mut_slice::<f32>()),
            Dtype::BF16 => {
                let narrow = slice.as_mut_slice::<bf16>();
                let mut values = narrow.to_f32_vec();
                let result = update(&mut values);
                narrow.convert_from_f32_slice(&values);
                result
            }
            Dtype::F16 => {
                let narrow = slice.as_mut_slice::<f16>();
                let mut values = narrow.to_f32_vec();
                let result = update(&mut values);
                narrow.convert_from_f32_slice(&values);
                result
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_widened_changed_and_rounded() {
        for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16] {
            // SAFETY: it stays in this thread, which uses it once at a time.
            let slice = unsafe { Slice::zeros(dtype, 3, None) };
            // SAFETY: as above.
            let seen = unsafe {
                update_f32(&slice, |values| values.copy_from_slice(&[1.0, -2.5, 1.0 + f32::EPSILON]));
                read_f32(&slice, <[f32]>::to_vec)
            };
            let last = if dtype == Dtype::F32 { 1.0 + f32::EPSILON } else { 1.0 };
            assert_eq!(seen, [1.0, -2.5, last]);
        }
    }
}
