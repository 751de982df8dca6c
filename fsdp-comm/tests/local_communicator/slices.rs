//! Memory of tests: what is in it, and what is in it after a collective.

use fsdp_comm::comm::{Phase, Tag};
use fsdp_comm::device::{Element, Slice};

/// A tag of the forward phase.
pub fn tag(unit: &str, step: u64) -> Tag {
    Tag { unit: unit.into(), phase: Phase::Forward, step }
}

/// New memory with these values.
pub fn slice<T: Element>(values: impl IntoIterator<Item = T>) -> Slice {
    let values: Vec<T> = values.into_iter().collect();
    // SAFETY: the tests look at values where no collective is under way on them, and give a collective slices of its own.
    let slice = unsafe { Slice::zeros(T::DTYPE, values.len(), None) };
    // SAFETY: the buffer is new and known to this thread only.
    unsafe { slice.as_mut_slice::<T>() }.copy_from_slice(&values);
    slice
}

/// A copy of the values; no collective may be under way on the slice.
pub fn values<T: Element>(slice: &Slice) -> Vec<T> {
    // SAFETY: the tests call this where no collective is under way on the slice.
    unsafe { slice.as_slice::<T>() }.to_vec()
}
