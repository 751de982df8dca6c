//! How the tests of this workspace compare numbers.
//!
//! A relative tolerance is relative to the expected number, however small that is. NaN is close to nothing, infinity to
//! itself. Lengths, keys and shapes must be equal. Differences are computed in f64.
//!
//! [`assert_close`] compares each number. [`distance`] is that of whole vectors, for results in which single numbers
//! are sums that cancel.

use std::collections::BTreeMap;
use std::fmt::{Debug, Display};

/// How far a number may be from the expected one: `absolute + relative * |expected|`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Within {
    relative: f64,
    absolute: f64,
}

/// Within `tolerance * |expected|`.
pub const fn relative(tolerance: f64) -> Within {
    Within { relative: tolerance, absolute: 0.0 }
}

/// Within `tolerance`.
pub const fn absolute(tolerance: f64) -> Within {
    Within { relative: 0.0, absolute: tolerance }
}

impl Within {
    /// Within the sum of this and `tolerance`, as NumPy and PyTorch have it.
    pub const fn plus(self, tolerance: f64) -> Within {
        Within { absolute: self.absolute + tolerance, ..self }
    }

    fn holds(self, found: f64, expected: f64) -> bool {
        // An infinity is close to itself only.
        found == expected
            || expected.is_finite()
                && (found - expected).abs() <= self.absolute + self.relative * expected.abs()
    }
}

/// Numbers, alone or in lists and maps.
pub trait Close {
    /// Says where `self` is further from `expected` than `within`.
    ///
    /// # Errors
    ///
    /// The first place, and both numbers there.
    fn check(&self, expected: &Self, within: Within) -> Result<(), String>;
}

/// What is compared in the end.
pub trait Number: Copy + Into<f64> {}

impl Number for f32 {}
impl Number for f64 {}

impl<T: Number> Close for T {
    fn check(&self, expected: &Self, within: Within) -> Result<(), String> {
        let (found, expected) = ((*self).into(), (*expected).into());
        match within.holds(found, expected) {
            true => Ok(()),
            false => Err(format!(": {found:e} instead of {expected:e}, {within:?}")),
        }
    }
}

impl<T: Close> Close for [T] {
    fn check(&self, expected: &Self, within: Within) -> Result<(), String> {
        if self.len() != expected.len() {
            return Err(format!(": {} values instead of {}", self.len(), expected.len()));
        }
        for (index, (found, expected)) in self.iter().zip(expected).enumerate() {
            found.check(expected, within).map_err(|error| format!("[{index}]{error}"))?;
        }
        Ok(())
    }
}

impl<T: Close> Close for Vec<T> {
    fn check(&self, expected: &Self, within: Within) -> Result<(), String> {
        self[..].check(&expected[..], within)
    }
}

impl<T: Close, const N: usize> Close for [T; N] {
    fn check(&self, expected: &Self, within: Within) -> Result<(), String> {
        self[..].check(&expected[..], within)
    }
}

/// A name or a shape, which must be equal, and numbers.
impl<A: PartialEq + Debug, T: Close> Close for (A, T) {
    fn check(&self, expected: &Self, within: Within) -> Result<(), String> {
        if self.0 != expected.0 {
            return Err(format!(": {:?} instead of {:?}", self.0, expected.0));
        }
        self.1.check(&expected.1, within).map_err(|error| format!(", {:?}{error}", self.0))
    }
}

impl<K: Ord + Debug, T: Close> Close for BTreeMap<K, T> {
    fn check(&self, expected: &Self, within: Within) -> Result<(), String> {
        if !self.keys().eq(expected.keys()) {
            return Err(format!(": {:?} instead of {:?}", self.keys(), expected.keys()));
        }
        for (key, found) in self {
            found.check(&expected[key], within).map_err(|error| format!("[{key:?}]{error}"))?;
        }
        Ok(())
    }
}

/// Panics unless `found` is `within` of `expected`, in every number; `what` begins the message.
#[track_caller]
pub fn assert_close<T: Close + ?Sized>(found: &T, expected: &T, within: Within, what: impl Display) {
    if let Err(error) = found.check(expected, within) {
        panic!("{what}{error}");
    }
}

/// Panics unless there are numbers and each is `within` of the one that is expected of all.
#[track_caller]
pub fn assert_each_close<T: Number>(found: &[T], expected: f64, within: Within, what: impl Display) {
    assert!(!found.is_empty(), "{what}: no numbers");
    let found: Vec<f64> = found.iter().map(|&number| number.into()).collect();
    assert_close(&found[..], &vec![expected; found.len()][..], within, what);
}

/// `|found - expected| / |expected|` in the Euclidean norm: NaN or infinite if there is such a number, and infinite if
/// only the expected norm is zero.
#[track_caller]
pub fn distance<T: Number>(found: &[T], expected: &[T]) -> f64 {
    distance_with_least(found, expected, 0.0)
}

/// [`distance`] where an expected norm below `least` counts as `least`: for what is zero but for rounding.
#[track_caller]
pub fn distance_with_least<T: Number>(found: &[T], expected: &[T], least: f64) -> f64 {
    assert_eq!(found.len(), expected.len(), "lengths of vectors that are compared");
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let pairs = found.iter().zip(expected).map(|(&found, &expected)| (found.into(), expected.into()));
    let difference = norm(&mut pairs.map(|(found, expected): (f64, f64)| found - expected));
    if difference == 0.0 {
        return 0.0;
    }
    difference / norm(&mut expected.iter().map(|&value| value.into())).max(least)
}

/// Panics unless the [`distance`] is at most `tolerance`; `what` begins the message.
#[track_caller]
pub fn assert_distance<T: Number>(found: &[T], expected: &[T], tolerance: f64, what: impl Display) {
    assert_distance_with_least(found, expected, 0.0, tolerance, what);
}

/// [`assert_distance`] by [`distance_with_least`].
#[track_caller]
pub fn assert_distance_with_least<T: Number>(
    found: &[T],
    expected: &[T],
    least: f64,
    tolerance: f64,
    what: impl Display,
) {
    let distance = distance_with_least(found, expected, least);
    assert!(distance <= tolerance, "{what} is off by {distance:e}, more than {tolerance:e}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn off<T: Close + ?Sized>(found: &T, expected: &T, within: Within) -> String {
        found.check(expected, within).unwrap_err()
    }

    #[test]
    fn relative_is_relative_to_what_is_expected() {
        assert_eq!(1.001e-9.check(&1e-9, relative(1.1e-3)), Ok(()));
        assert!(off(&1.001e-9, &1e-9, relative(0.9e-3)).starts_with(": 1.001e-9 instead of 1e-9"));
        // Not to the larger of both.
        assert!(2.0.check(&1.0, relative(0.6)).is_err());
        // Nothing but zero is close to zero.
        assert!(f64::MIN_POSITIVE.check(&0.0, relative(1e3)).is_err());
    }

    #[test]
    fn absolute_is_absolute_and_both_add_up() {
        assert!(1.5.check(&1.0, absolute(0.5)).is_ok() && 1.5.check(&1.0, absolute(0.49)).is_err());
        assert!(8.0.check(&5.0, relative(0.5).plus(0.5)).is_ok());
        assert!(8.1.check(&5.0, relative(0.5).plus(0.5)).is_err());
    }

    #[test]
    fn nan_is_close_to_nothing_and_infinity_to_itself() {
        for other in [f64::NAN, 0.0, f64::INFINITY] {
            assert!(f64::NAN.check(&other, absolute(f64::INFINITY)).is_err());
            assert!(other.check(&f64::NAN, absolute(1.0)).is_err());
        }
        assert!(f64::INFINITY.check(&f64::INFINITY, relative(0.0)).is_ok());
        assert!(f64::INFINITY.check(&f64::NEG_INFINITY, absolute(1.0)).is_err());
        assert!(1.0.check(&f64::INFINITY, relative(1.0)).is_err());
        assert!(f64::INFINITY.check(&1.0, relative(1.0)).is_err());
    }

    #[test]
    fn lengths_keys_and_shapes_are_compared() {
        let near = relative(1.0);
        assert_eq!(off(&vec![1.0f32], &vec![1.0, 1.0], near), ": 1 values instead of 2");
        assert_eq!(off(&[1.0, 1.0][..], &[1.0][..], near), ": 2 values instead of 1");
        let map = |key: &str, value: f32| BTreeMap::from([(key.to_owned(), (vec![1usize], vec![value]))]);
        assert_eq!(off(&map("a", 1.0), &map("b", 1.0), near), ": [\"a\"] instead of [\"b\"]");
        assert_eq!(off(&BTreeMap::new(), &map("b", 1.0), near), ": [] instead of [\"b\"]");
        assert!(off(&map("a", 3.0), &map("a", 1.0), near).starts_with("[\"a\"], [1][0]: 3e0 instead of 1e0"));
        assert_eq!(off(&([2, 3], 1.0), &([3, 2], 1.0), near), ": [2, 3] instead of [3, 2]");
    }

    #[test]
    #[should_panic(expected = "losses: no numbers")]
    fn of_no_numbers_none_is_close() {
        assert_each_close::<f32>(&[], 1.0, absolute(1.0), "losses");
    }

    #[test]
    fn distances_are_relative_to_the_expected_norm() {
        assert_eq!(distance(&[3.0, 0.0], &[3.0, 4.0]), 0.8);
        assert_eq!(distance(&[3.0f32, 4.0], &[0.0, 4.0]), 0.75);
        assert_eq!(distance(&[0.0], &[0.0]), 0.0);
        assert_eq!(distance(&[1e-30], &[0.0]), f64::INFINITY);
        assert_eq!(distance_with_least(&[1e-3], &[1e-4], 1.0), 9e-4);
        assert!(distance(&[f64::NAN], &[1.0]).is_nan());
        // Sums of squares that f32 does not hold.
        assert_eq!(distance(&[2e30f32], &[1e30]), 1.0);
    }

    #[test]
    #[should_panic(expected = "NaN")]
    fn no_distance_of_nan_is_small_enough() {
        assert_distance(&[f64::NAN], &[1.0], f64::INFINITY, "it");
    }

    #[test]
    #[should_panic(expected = "lengths")]
    fn vectors_of_other_lengths_have_no_distance() {
        let _ = distance(&[1.0], &[1.0, 0.0]);
    }
}
