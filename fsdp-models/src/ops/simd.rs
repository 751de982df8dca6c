//! Plain loops compiled for the widest vectors of this machine, and the reductions over them.
//!
//! The compiler may not reorder a floating-point sum, so a reduction keeps `LANES` partial sums, combined in a fixed
//! order at the end: vectorised, the same on every machine, and a function of the row alone.

use std::mem::MaybeUninit;

/// Partial results of a reduction: four 512-bit registers, enough to hide the latency of a fused multiply-add.
const LANES: usize = 64;

/// Runs `f`, compiled for the instruction set that this machine has. `f` must be marked `#[inline(always)]`, as must
/// all that it calls.
#[inline(always)]
pub(super) fn vectorise<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}

/// A new vector of `len` elements written by `fill`, without a pass that zeroes it first.
///
/// # Safety
/// `fill` writes every element.
pub(super) unsafe fn filled_by<T>(len: usize, fill: impl FnOnce(&mut [MaybeUninit<T>])) -> Vec<T> {
    let mut values = Vec::with_capacity(len);
    fill(&mut values.spare_capacity_mut()[..len]);
    // SAFETY: the capacity is at least `len`, and `fill` has written all elements by the caller's promise.
    unsafe { values.set_len(len) };
    values
}

/// `map` of each element, with the lanes summed.
#[inline(always)]
fn reduce<const N: usize>(
    len: usize,
    start: f32,
    step: impl Fn(f32, usize) -> f32,
    combine: impl Fn(f32, f32) -> f32,
) -> f32 {
    let mut lanes = [start; N];
    let whole = len / N * N;
    let mut base = 0;
    while base < whole {
        for (lane, value) in lanes.iter_mut().enumerate() {
            *value = step(*value, base + lane);
        }
        base += N;
    }
    for (lane, value) in lanes.iter_mut().enumerate().take(len - whole) {
        *value = step(*value, whole + lane);
    }
    let mut half = N / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = combine(lanes[lane], lanes[lane + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// The sum of `term(i)` for `i` in `0..len`.
#[inline(always)]
pub(super) fn sum_by(len: usize, term: impl Fn(usize) -> f32) -> f32 {
    reduce::<LANES>(
        len,
        0.0,
        #[inline(always)]
        |sum, i| sum + term(i),
        #[inline(always)]
        |a, b| a + b,
    )
}

/// The scalar product of two rows of one length.
#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let b = &b[..a.len()];
    reduce::<LANES>(
        a.len(),
        0.0,
        #[inline(always)]
        |sum, i| a[i].mul_add(b[i], sum),
        #[inline(always)]
        |a, b| a + b,
    )
}

/// The largest element, minus infinity for an empty row; NaN is passed over.
#[inline(always)]
pub(super) fn max(row: &[f32]) -> f32 {
    #[inline(always)]
    fn larger(a: f32, b: f32) -> f32 {
        if b > a { b } else { a }
    }
    reduce::<LANES>(
        row.len(),
        f32::NEG_INFINITY,
        #[inline(always)]
        |max, i| larger(max, row[i]),
        larger,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reductions_of_any_length() {
        for len in [0, 1, 31, 63, 64, 65, 127, 128, 200] {
            let row: Vec<f32> = (0..len).map(|i| ((i * 37) % 101) as f32 - 50.0).collect();
            let (sum, squares, largest) = vectorise(
                #[inline(always)]
                || (sum_by(row.len(), |i| row[i]), dot(&row, &row), max(&row)),
            );
            assert_eq!(sum, row.iter().sum::<f32>());
            assert_eq!(squares, row.iter().map(|v| v * v).sum::<f32>());
            assert_eq!(largest, row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        }
    }
}
