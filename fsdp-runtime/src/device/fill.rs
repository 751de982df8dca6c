//! Fills, scalings and casts of flat buffers, on a stream.

use half::{bf16, f16};

use super::{Element, Slice, Stream, update_f32};
use crate::comm::CommError;
use crate::spec::Dtype;

/// A constant to fill with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Zeros.
    Zero,
    /// NaNs, so that a read of what should not be read is loud.
    Poison,
}

/// Fills `slice`, in stream order.
///
/// The caller's stream order must make the stream the only one that uses these elements.
///
/// # Errors
/// Those of [`Stream::submit`].
pub fn fill(stream: &dyn Stream, slice: &Slice, value: Fill) -> Result<(), CommError> {
    if slice.is_empty() {
        return Ok(());
    }
    let slice = slice.clone();
    stream.submit(Box::new(move || {
        match slice.dtype() {
            Dtype::F32 => fill_all(&slice, value, 0f32, f32::NAN),
            Dtype::BF16 => fill_all(&slice, value, bf16::ZERO, bf16::NAN),
            Dtype::F16 => fill_all(&slice, value, f16::ZERO, f16::NAN),
        }
        Ok(())
    }))
}

fn fill_all<T: Element>(slice: &Slice, value: Fill, zero: T, poison: T) {
    let value = match value {
        Fill::Zero => zero,
        Fill::Poison => poison,
    };
    // SAFETY: by the contract of `fill` the stream that runs this is the only user of these elements.
    unsafe { slice.as_mut_slice::<T>() }.fill(value);
}

/// Multiplies a slice by `factor`, in f32, in stream order.
///
/// The caller's stream order must make the stream the only one that uses these elements.
///
/// # Errors
/// Those of [`Stream::submit`].
pub fn scale(stream: &dyn Stream, slice: &Slice, factor: f32) -> Result<(), CommError> {
    let slice = slice.clone();
    stream.submit(Box::new(move || {
        // SAFETY: by the contract the stream that runs this is the only user of these elements.
        unsafe { update_f32(&slice, |values| values.iter_mut().for_each(|value| *value *= factor)) };
        Ok(())
    }))
}

/// `to = from`, element by element, rounding to nearest even, in stream order; the lengths must be equal.
///
/// The caller's stream order must make the stream the only one that uses `to`, and no one may write `from`.
///
/// # Errors
/// Those of [`Stream::submit`].
///
/// # Panics
/// If the lengths differ.
pub fn cast(stream: &dyn Stream, from: &Slice, to: &Slice) -> Result<(), CommError> {
    assert_eq!(from.len(), to.len(), "cast between buffers of different lengths");
    let (from, to) = (from.clone(), to.clone());
    stream.submit(Box::new(move || {
        match from.dtype() {
            // SAFETY: by the contract of `cast` no one writes `from` meanwhile.
            Dtype::F32 => write(&to, unsafe { from.as_slice::<f32>() }.iter().copied()),
            // SAFETY: as above.
            Dtype::BF16 => write(&to, unsafe { from.as_slice::<bf16>() }.iter().map(|x| x.to_f32())),
            // SAFETY: as above.
            Dtype::F16 => write(&to, unsafe { from.as_slice::<f16>() }.iter().map(|x| x.to_f32())),
        }
        Ok(())
    }))
}

fn write(to: &Slice, values: impl Iterator<Item = f32>) {
    fn store<T>(to: &mut [T], values: impl Iterator<Item = f32>, convert: impl Fn(f32) -> T) {
        to.iter_mut().zip(values).for_each(|(to, value)| *to = convert(value));
    }
    match to.dtype() {
        // SAFETY: by the contract of `cast` this stream is the only user of `to`.
        Dtype::F32 => store(unsafe { to.as_mut_slice::<f32>() }, values, |x| x),
        // SAFETY: as above.
        Dtype::BF16 => store(unsafe { to.as_mut_slice::<bf16>() }, values, bf16::from_f32),
        // SAFETY: as above.
        Dtype::F16 => store(unsafe { to.as_mut_slice::<f16>() }, values, f16::from_f32),
    }
}
