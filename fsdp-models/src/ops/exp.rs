//! An exponential that vectorises as a loop body.

/// `e^x` to within 2 units in the last place, subnormal results included: 0 from -104 down, infinity from 89
/// up, NaN for NaN.
///
/// Cody-Waite reduction `x = n ln 2 + r`, `|r| <= ln 2 / 2`; `e^r = 1 + r + r² q(r)` with the minimax
/// polynomial of degree 4 for `q` (relative error of `e^r` below 4e-9); the scale `2^n` is applied in two
/// steps, so that neither factor leaves the range of normal numbers.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    /// Added and taken away again, it rounds to an integer, which is left in the low bits meanwhile.
    const SHIFT: f32 = 12_582_912.0;
    /// The high part of ln 2 has 9 trailing zeros: its product with any `n` here is exact.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;

    // Comparisons that are false for NaN leave it as it is. A factor of 0 rather than a product that
    // underflows: the processor takes some hundred cycles for each of those.
    let last = if x < -104.0 { 0.0 } else { 1.0 };
    let x = if x < -104.0 { 0.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, SHIFT);
    let n = shifted - SHIFT;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));

    let q = 1.381_459_7e-3;
    let q = r.mul_add(q, 8.368_717e-3);
    let q = r.mul_add(q, 4.166_839e-2);
    let q = r.mul_add(q, 1.666_652e-1);
    let q = r.mul_add(q, 4.999_999_3e-1);
    let e = (r * r).mul_add(q, r) + 1.0;

    let n = shifted.to_bits().wrapping_sub(SHIFT.to_bits()) as i32;
    let half = n >> 1;
    e * power_of_two(half) * power_of_two(n.wrapping_sub(half)) * last
}

/// `2^n` for `n` in -126..=127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::simd::vectorise;

    /// Distance in units of the last place of the f32 nearest to `exact` (the smallest subnormal below the
    /// normal range).
    fn ulps(value: f32, exact: f64) -> f64 {
        let exponent = (exact as f32).abs().max(f32::MIN_POSITIVE).to_bits() >> 23;
        let ulp = 2f64.powi(exponent as i32 - 127 - 23);
        (f64::from(value) - exact).abs() / ulp
    }

    #[test]
    fn within_two_ulps_over_the_whole_range() {
        let step = 1.0 / 8192.0;
        let xs: Vec<f32> =
            (0..((88.72f32 + 104.5) / step) as usize).map(|i| -104.5 + i as f32 * step).collect();
        let ys: Vec<f32> = vectorise(
            #[inline(always)]
            || xs.iter().map(|&x| exp(x)).collect(),
        );
        let mut worst = (0.0, 0.0);
        for (&x, &y) in xs.iter().zip(&ys) {
            let distance = ulps(y, f64::from(x).exp());
            if distance > worst.0 {
                worst = (distance, x);
            }
        }
        assert!(worst.0 <= 1.1, "{} ulps at {}", worst.0, worst.1);
    }

    #[test]
    fn near_zero_and_at_the_ends() {
        for bits in (0..0x3f80_0000u32).step_by(99_991) {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                assert!(ulps(exp(x), f64::from(x).exp()) <= 1.1, "{x:e}");
            }
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::MIN), 0.0);
        assert_eq!(exp(-104.0), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(88.73), f32::INFINITY);
        assert!(exp(88.72).is_finite());
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(sigmoid(f32::NEG_INFINITY), 0.0);
        assert_eq!(sigmoid(f32::INFINITY), 1.0);
    }
}
