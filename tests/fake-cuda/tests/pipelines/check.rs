//! What the model check chooses by its checker is drawn here.

use std::cell::Cell;

std::thread_local! {
    static STATE: Cell<u64> = const { Cell::new(0) };
}

/// Begins the sequence of a seed on this thread.
pub(crate) fn seed(seed: u64) {
    STATE.set(seed);
}

/// One of `0..count` (SplitMix64).
pub(crate) fn choose(count: usize) -> usize {
    let state = STATE.get().wrapping_add(0x9E37_79B9_7F4A_7C15);
    STATE.set(state);
    let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z ^ (z >> 31)) % count as u64) as usize
}

/// One of `values`.
pub(crate) fn choose_of<T: Copy>(values: &[T]) -> T {
    values[choose(values.len())]
}
