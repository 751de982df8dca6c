//! Plain loops compiled for the widest vectors of this machine, and the reductions over them.
//!
//! The compiler may not reorder a floating-point sum, so a reduction keeps `LANES` partial sums, combined in
//! a fixed order at the end: vectorised, the same on every machine, and a function of the row alone.

use std::mem::MaybeUninit;

/// Partial results of a reduction: four 512-bit registers, enough to hide the latency of a fused
/// multiply-add.
const LANES: usize = 64;

/// Runs `f`, compiled for the instruction set that this machine has. `f` must be marked `#[inline(always)]`,
/// as must all that it calls.
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

/// Folds the columns of `rows`, all of one length, into lanes with `step`, and the lanes into one with
/// `combine`.
#[inline(always)]
fn reduce<const ROWS: usize>(
    rows: [&[f32]; ROWS],
    start: f32,
    step: impl Fn(f32, [f32; ROWS]) -> f32,
    combine: impl Fn(f32, f32) -> f32,
) -> f32 {
    let mut lanes = [start; LANES];
    let (chunks, tails) =
        (rows.map(|row| row.as_chunks::<LANES>().0), rows.map(|row| row.as_chunks::<LANES>().1));
    for index in 0..chunks[0].len() {
        let chunk = chunks.map(|row| &row[index]);
        for lane in 0..LANES {
            lanes[lane] = step(lanes[lane], chunk.map(|row| row[lane]));
        }
    }
    for lane in 0..tails[0].len() {
        lanes[lane] = step(lanes[lane], tails.map(|row| row[lane]));
    }
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = combine(lanes[lane], lanes[lane + half]);
        }
        half /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn plus(a: f32, b: f32) -> f32 {
    a + b
}

/// The sum of a row.
#[inline(always)]
pub(super) fn sum(row: &[f32]) -> f32 {
    reduce(
        [row],
        0.0,
        #[inline(always)]
        |sum, [a]| sum + a,
        plus,
    )
}

/// The scalar product of two rows of one length.
#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    reduce(
        [a, &b[..a.len()]],
        0.0,
        #[inline(always)]
        |sum, [a, b]| a.mul_add(b, sum),
        plus,
    )
}

/// The sum of the products of three rows of one length.
#[inline(always)]
pub(super) fn dot3(a: &[f32], b: &[f32], c: &[f32]) -> f32 {
    let rows = [a, &b[..a.len()], &c[..a.len()]];
    reduce(
        rows,
        0.0,
        #[inline(always)]
        |sum, [a, b, c]| (a * b).mul_add(c, sum),
        plus,
    )
}

/// The largest element, minus infinity for an empty row; NaN is passed over.
#[inline(always)]
pub(super) fn max(row: &[f32]) -> f32 {
    #[inline(always)]
    fn larger(a: f32, b: f32) -> f32 {
        if b > a { b } else { a }
    }
    reduce(
        [row],
        f32::NEG_INFINITY,
        #[inline(always)]
        |max, [a]| larger(max, a),
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
            let (total, squares, largest) = vectorise(
                #[inline(always)]
                || (sum(&row), dot(&row, &row), max(&row)),
            );
            assert_eq!(total, row.iter().sum::<f32>());
            assert_eq!(squares, row.iter().map(|v| v * v).sum::<f32>());
            assert_eq!(largest, row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        }
    }
}
