//! Fills, scalings and casts of flat buffers, on a stream.

use half::{bf16, f16};

use super::{Element, Slice, Stream, move_average, update_f32};
use crate::error::CommError;
use crate::spec::Dtype;

/// Whether a reduction replaces what is in its destination or adds to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accumulate {
    /// `dst = value`.
    Overwrite,
    /// `dst = dst + value`.
    Add,
}

/// A constant to fill with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Zeros.
    Zero,
    /// NaNs, so that a read of what should not be read is loud.
    Poison,
}

/// What a stream can do with flat buffers, element by element: made by [`fill`], [`scale`], [`cast`], [`move_towards`] and
/// [`swap`], which check what it takes.
#[derive(Clone, Debug)]
pub struct Elementwise(Op);

/// One of them.
#[derive(Clone, Debug)]
pub enum Op {
    /// Fills a slice.
    Fill(Slice, Fill),
    /// Multiplies a slice by a factor, in f32.
    Scale(Slice, f32),
    /// Copies the first slice to the second, which is as long and apart from it, rounding to nearest even.
    Cast(Slice, Slice),
    /// [`move_average`] of the first slice towards the second, both of f32, as long and apart, with this decay.
    Move(Slice, Slice, f64),
    /// Exchanges the elements of two slices of one dtype and length, apart from each other.
    Swap(Slice, Slice),
}

/// Fills `slice`, in stream order.
///
/// # Errors
/// Those of [`Stream::elementwise`].
pub fn fill(stream: &dyn Stream, slice: &Slice, value: Fill) -> Result<(), CommError> {
    if slice.is_empty() {
        return Ok(());
    }
    stream.elementwise(Elementwise(Op::Fill(slice.clone(), value)))
}

/// Multiplies a slice by `factor`, in f32, in stream order.
///
/// # Errors
/// Those of [`Stream::elementwise`].
pub fn scale(stream: &dyn Stream, slice: &Slice, factor: f32) -> Result<(), CommError> {
    stream.elementwise(Elementwise(Op::Scale(slice.clone(), factor)))
}

/// `to = from`, element by element, rounding to nearest even, in stream order; the lengths must be equal.
///
/// # Errors
/// Those of [`Stream::elementwise`].
///
/// # Panics
/// If the lengths differ, or the slices overlap.
pub fn cast(stream: &dyn Stream, from: &Slice, to: &Slice) -> Result<(), CommError> {
    assert_eq!(from.len(), to.len(), "cast between buffers of different lengths");
    assert!(!from.overlaps(to), "cast between buffers that overlap");
    stream.elementwise(Elementwise(Op::Cast(from.clone(), to.clone())))
}

/// [`move_average`], in stream order; both are of f32 and as long. On a device an average that equals its weight may
/// change by its rounding.
///
/// # Errors
/// Those of [`Stream::elementwise`].
///
/// # Panics
/// If a dtype is not f32, the lengths differ, or the slices overlap.
pub fn move_towards(
    stream: &dyn Stream,
    average: &Slice,
    weights: &Slice,
    decay: f64,
) -> Result<(), CommError> {
    assert_eq!((average.dtype(), weights.dtype()), (Dtype::F32, Dtype::F32), "an average that is not of f32");
    assert_eq!(average.len(), weights.len(), "an average and its weights differ in length");
    assert!(!average.overlaps(weights), "an average that overlaps its weights");
    stream.elementwise(Elementwise(Op::Move(average.clone(), weights.clone(), decay)))
}

/// Exchanges the elements of two slices of one dtype and length, in stream order.
///
/// # Errors
/// Those of [`Stream::elementwise`].
///
/// # Panics
/// If the dtypes or lengths differ, or the slices overlap.
pub fn swap(stream: &dyn Stream, a: &Slice, b: &Slice) -> Result<(), CommError> {
    assert_eq!((a.dtype(), a.len()), (b.dtype(), b.len()), "an exchange of buffers that differ");
    assert!(!a.overlaps(b), "an exchange of buffers that overlap");
    stream.elementwise(Elementwise(Op::Swap(a.clone(), b.clone())))
}

impl Elementwise {
    /// What it is: that the slices fit together is checked.
    pub fn op(&self) -> &Op {
        &self.0
    }

    /// Does it, in host memory.
    ///
    /// # Safety
    /// While it runs no one else uses the slice that is written, and no one writes the one that is read.
    ///
    /// # Panics
    /// If a slice is of a device.
    pub(crate) unsafe fn run(&self) {
        for op in self.in_segments() {
            // SAFETY: the caller's promise, of parts of the slices.
            unsafe { op.run_segment() };
        }
    }

    /// This op, cut into one for each run of elements that is contiguous in all of its slices.
    fn in_segments(&self) -> Vec<Elementwise> {
        match &self.0 {
            Op::Fill(slice, value) => {
                slice.segments().into_iter().map(|slice| Elementwise(Op::Fill(slice, *value))).collect()
            }
            Op::Scale(slice, factor) => {
                slice.segments().into_iter().map(|slice| Elementwise(Op::Scale(slice, *factor))).collect()
            }
            Op::Cast(from, to) => from
                .paired_segments(to)
                .into_iter()
                .map(|(from, to)| Elementwise(Op::Cast(from, to)))
                .collect(),
            Op::Move(average, weights, decay) => average
                .paired_segments(weights)
                .into_iter()
                .map(|(average, weights)| Elementwise(Op::Move(average, weights, *decay)))
                .collect(),
            Op::Swap(a, b) => {
                a.paired_segments(b).into_iter().map(|(a, b)| Elementwise(Op::Swap(a, b))).collect()
            }
        }
    }

    /// # Safety
    /// As for [`Elementwise::run`]; the slices are contiguous.
    unsafe fn run_segment(&self) {
        // SAFETY: no one else uses the slices, by the caller's promise; that two slices of one op are apart was checked
        // when it was made, so that no two of the references made here meet.
        unsafe {
            match &self.0 {
                Op::Fill(slice, value) => match slice.dtype() {
                    Dtype::F32 => fill_all(slice, *value, 0f32, f32::NAN),
                    Dtype::BF16 => fill_all(slice, *value, bf16::ZERO, bf16::NAN),
                    Dtype::F16 => fill_all(slice, *value, f16::ZERO, f16::NAN),
                },
                Op::Scale(slice, factor) => {
                    update_f32(slice, |values| values.iter_mut().for_each(|value| *value *= factor));
                }
                Op::Cast(from, to) => match from.dtype() {
                    Dtype::F32 => write(to, from.as_slice::<f32>().iter().copied()),
                    Dtype::BF16 => write(to, from.as_slice::<bf16>().iter().map(|x| x.to_f32())),
                    Dtype::F16 => write(to, from.as_slice::<f16>().iter().map(|x| x.to_f32())),
                },
                Op::Move(average, weights, decay) => {
                    move_average(average.as_mut_slice::<f32>(), weights.as_slice::<f32>(), *decay);
                }
                Op::Swap(a, b) => a.as_mut_bytes().swap_with_slice(b.as_mut_bytes()),
            }
        }
    }
}

/// # Safety
/// As for [`Slice::as_mut_slice`].
unsafe fn fill_all<T: Element>(slice: &Slice, value: Fill, zero: T, poison: T) {
    let value = match value {
        Fill::Zero => zero,
        Fill::Poison => poison,
    };
    // SAFETY: the caller's promise.
    unsafe { slice.as_mut_slice::<T>() }.fill(value);
}

/// # Safety
/// As for [`Slice::as_mut_slice`].
unsafe fn write(to: &Slice, values: impl Iterator<Item = f32>) {
    fn store<T>(to: &mut [T], values: impl Iterator<Item = f32>, convert: impl Fn(f32) -> T) {
        to.iter_mut().zip(values).for_each(|(to, value)| *to = convert(value));
    }
    // SAFETY: the caller's promise.
    unsafe {
        match to.dtype() {
            Dtype::F32 => store(to.as_mut_slice::<f32>(), values, |x| x),
            Dtype::BF16 => store(to.as_mut_slice::<bf16>(), values, bf16::from_f32),
            Dtype::F16 => store(to.as_mut_slice::<f16>(), values, f16::from_f32),
        }
    }
}
