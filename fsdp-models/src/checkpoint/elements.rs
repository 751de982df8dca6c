//! Compares the values of two tensors.

use fsdp::checkpoint::StoredDtype;
use half::{bf16, f16};

/// Consecutive elements of a tensor.
pub(super) struct Elements {
    pub dtype: StoredDtype,
    /// Little-endian.
    pub bytes: Vec<u8>,
}

/// How the values of a tensor differ.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ValueDifference {
    /// The tensor, with its section.
    pub name: String,
    /// Its dims, outermost first.
    pub shape: Vec<usize>,
    /// Number of elements that differ.
    pub differing: usize,
    /// The first one of them, flattened.
    pub first: usize,
    /// Largest `|a - b|`; infinite where only one is a number.
    pub absolute: Largest,
    /// Largest `|a - b| / max(|a|, |b|)`.
    pub relative: Largest,
}

/// The largest of some numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Largest {
    /// The number.
    pub value: f64,
    /// Of which element, flattened.
    pub element: usize,
}

impl Largest {
    fn take(&mut self, value: f64, element: usize) {
        if value > self.value {
            *self = Largest { value, element };
        }
    }
}

impl ValueDifference {
    /// Takes in elements from `start` on, the same ones of both sides. Elements of one dtype are the same if their bits
    /// are, others if they are the same number.
    pub(super) fn compare(&mut self, start: usize, a: &Elements, b: &Elements) {
        let exact = a.dtype == b.dtype;
        if exact && a.bytes == b.bytes {
            return;
        }
        let size = a.dtype.size();
        let bits = |at: usize| a.bytes[at * size..][..size] == b.bytes[at * size..][..size];
        for (at, (a, b)) in a.numbers().into_iter().zip(b.numbers()).enumerate() {
            let same = if exact { bits(at) } else { a == b || (a.is_nan() && b.is_nan()) };
            if same {
                continue;
            }
            let element = start + at;
            if self.differing == 0 {
                self.first = element;
            }
            self.differing += 1;
            let distance = match (a - b).abs() {
                distance if distance.is_nan() && !(a.is_nan() && b.is_nan()) => f64::INFINITY,
                distance => distance,
            };
            self.absolute.take(distance, element);
            let scale = a.abs().max(b.abs());
            self.relative.take(if distance.is_finite() { distance / scale } else { distance }, element);
        }
    }
}

impl Elements {
    fn numbers(&self) -> Vec<f64> {
        fn each<const N: usize>(bytes: &[u8], convert: impl Fn([u8; N]) -> f64) -> Vec<f64> {
            bytes.as_chunks::<N>().0.iter().map(|&element| convert(element)).collect()
        }
        let bytes = &self.bytes[..];
        match self.dtype {
            StoredDtype::F32 => each(bytes, |b| f32::from_le_bytes(b).into()),
            StoredDtype::BF16 => each(bytes, |b| bf16::from_le_bytes(b).to_f64()),
            StoredDtype::F16 => each(bytes, |b| f16::from_le_bytes(b).to_f64()),
            StoredDtype::F64 => each(bytes, f64::from_le_bytes),
            StoredDtype::U8 => each(bytes, |b| u8::from_le_bytes(b).into()),
            StoredDtype::U32 => each(bytes, |b| u32::from_le_bytes(b).into()),
            StoredDtype::I16 => each(bytes, |b| i16::from_le_bytes(b).into()),
            StoredDtype::I32 => each(bytes, |b| i32::from_le_bytes(b).into()),
            StoredDtype::I64 => each(bytes, |b| i64::from_le_bytes(b) as f64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(values: &[f32]) -> Elements {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Elements { dtype: StoredDtype::F32, bytes }
    }

    fn bf16s(values: &[f32]) -> Elements {
        let bytes = values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect();
        Elements { dtype: StoredDtype::BF16, bytes }
    }

    fn compare(a: &Elements, b: &Elements) -> ValueDifference {
        let mut difference = ValueDifference::default();
        difference.compare(10, a, b);
        difference
    }

    #[test]
    fn the_largest_differences_and_the_first_are_found() {
        let difference = compare(&f32s(&[1.0, 2.0, 100.0, 0.5]), &f32s(&[1.0, 1.0, 104.0, 0.5]));
        assert_eq!((difference.differing, difference.first), (2, 11));
        assert_eq!(difference.absolute, Largest { value: 4.0, element: 12 });
        assert_eq!(difference.relative, Largest { value: 0.5, element: 11 });
    }

    #[test]
    fn elements_of_one_dtype_are_compared_by_bits() {
        assert_eq!(compare(&f32s(&[f32::NAN, 0.0]), &f32s(&[f32::NAN, 0.0])), ValueDifference::default());
        let signs = compare(&f32s(&[0.0]), &f32s(&[-0.0]));
        assert_eq!((signs.differing, signs.absolute.value), (1, 0.0));
        let one = compare(&f32s(&[f32::NAN, 1.0]), &f32s(&[1.0, f32::INFINITY]));
        assert_eq!(
            (one.differing, one.absolute.value, one.relative.value),
            (2, f64::INFINITY, f64::INFINITY)
        );
    }

    #[test]
    fn elements_of_two_dtypes_are_compared_as_numbers() {
        let values = [1.0, -0.0, f32::NAN, 2.5];
        assert_eq!(compare(&f32s(&values), &bf16s(&values)), ValueDifference::default());
        assert_eq!(compare(&f32s(&[1.001]), &bf16s(&[1.001])).differing, 1);
    }
}
