//! Norms of gradients, and the coefficient that clips them.

use pulp::{Arch, Simd, WithSimd};

/// Partial sums that run side by side. Part of the result's definition: the order of additions depends on it.
const LANES: usize = 32;

/// Sum of the squares of `values`, in f64.
///
/// Element `i` is added to partial sum `i mod 32` and the partial sums are added in order, so that the bits
/// depend on the values only, not on the machine. They do depend on how values are cut in slices: sum over
/// the same cuts to compare bits.
pub fn squared_norm(values: &[f32]) -> f64 {
    Arch::new().dispatch(SquaredNorm(values))
}

struct SquaredNorm<'a>(&'a [f32]);

impl WithSimd for SquaredNorm<'_> {
    type Output = f64;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> f64 {
        let mut sums = [0f64; LANES];
        let (blocks, rest) = self.0.as_chunks::<LANES>();
        for block in blocks {
            for (sum, &value) in sums.iter_mut().zip(block) {
                let value = f64::from(value);
                *sum += value * value;
            }
        }
        for (sum, &value) in sums.iter_mut().zip(rest) {
            let value = f64::from(value);
            *sum += value * value;
        }
        sums.iter().sum()
    }
}

/// What gradients of global norm `norm` are multiplied with so that it does not exceed `max_norm`:
/// `min(1, max_norm / (norm + 1e-6))`, NaN if the norm is.
pub fn clip_scale(norm: f64, max_norm: f64) -> f32 {
    let scale = max_norm / (norm + 1e-6);
    if scale > 1.0 { 1.0 } else { scale as f32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_squares_of_any_length() {
        for n in [0usize, 1, 31, 32, 33, 100, 1000] {
            let values: Vec<f32> = (0..n).map(|i| i as f32 - 3.0).collect();
            let expected: f64 = values.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
            assert_eq!(squared_norm(&values), expected); // integers: exact in any order
        }
    }

    #[test]
    fn order_of_additions_is_as_documented() {
        let values: Vec<f32> = (0..333).map(|i| (i as f32 * 0.7).sin() * 10f32.powi(i % 7)).collect();
        let mut sums = [0f64; 32];
        for (i, &v) in values.iter().enumerate() {
            sums[i % 32] += f64::from(v) * f64::from(v);
        }
        assert_eq!(squared_norm(&values).to_bits(), sums.iter().sum::<f64>().to_bits());
    }

    #[test]
    fn squares_do_not_overflow_and_nan_is_seen() {
        assert_eq!(squared_norm(&[f32::MAX]), f64::from(f32::MAX) * f64::from(f32::MAX));
        assert!(squared_norm(&[1.0, f32::NAN]).is_nan());
    }

    #[test]
    fn clip_scale_bounds_the_norm() {
        assert_eq!(clip_scale(0.5, 1.0), 1.0);
        assert_eq!(clip_scale(0.0, 1.0), 1.0);
        assert_eq!(clip_scale(4.0, 1.0), (1.0 / 4.000001f64) as f32);
        assert_eq!(clip_scale(f64::INFINITY, 1.0), 0.0);
        assert!(clip_scale(f64::NAN, 1.0).is_nan());
    }
}
