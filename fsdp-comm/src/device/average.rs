//! Moving averages of weights.

use pulp::{Arch, Simd, WithSimd};

/// Moves each element of `average` towards that of `weights`: `average += (1 - decay) * (weight - average)`, in
/// f32. An average that equals its weight stays what it is.
///
/// # Panics
/// If the lengths differ.
pub fn move_average(average: &mut [f32], weights: &[f32], decay: f64) {
    assert_eq!(average.len(), weights.len(), "an average and its weights differ in length");
    Arch::new().dispatch(Move { average, weights, rate: (1.0 - decay) as f32 });
}

struct Move<'a> {
    average: &'a mut [f32],
    weights: &'a [f32],
    rate: f32,
}

impl WithSimd for Move<'_> {
    type Output = ();

    // Vectorised by the compiler for the instruction set it is inlined for, with the same bits in each.
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for (average, &weight) in self.average.iter_mut().zip(self.weights) {
            *average += self.rate * (weight - *average);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_by_a_share_of_the_difference() {
        let mut average = vec![1.0, 0.0, -3.0];
        move_average(&mut average, &[1.0, 8.0, 1.0], 0.75);
        assert_eq!(average, [1.0, 2.0, -2.0]);
        move_average(&mut average, &[0.0, 0.0, 5.0], 0.0);
        assert_eq!(average, [0.0, 0.0, 5.0]);
    }
}
