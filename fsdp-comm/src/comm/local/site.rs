//! Where the work of a collective is done: in host memory, or on a device that the ranks share.

use super::reduce;
use super::rendezvous::Meeting;
use crate::comm::arguments::same_place;
use crate::comm::{Accumulate, CommError};
use crate::device::Slice;

/// What ranks do with each other's slices between arrival and departure.
pub(super) trait Site {
    /// Copies `source` to `target`, unless they are the same memory.
    ///
    /// # Safety
    /// They have the same dtype and length, and are the same memory or do not overlap. Until the next rendezvous no one
    /// writes `source`, and no one else reads or writes `target`.
    unsafe fn copy(&self, source: &Slice, target: &Slice) -> Result<(), CommError>;

    /// `target (+)= scale * (sources[0] + sources[1] + ..)`, summed in this order in f32, rounded once.
    ///
    /// # Safety
    /// As for [`reduce::sum_into`], until the next rendezvous.
    unsafe fn sum_into(
        &self,
        sources: &[Slice],
        target: &Slice,
        scale: f32,
        accumulate: Accumulate,
    ) -> Result<(), CommError>;

    /// Waits until all ranks are here; what they did before is done before what is done from now on.
    fn rendezvous(&self, meeting: &mut Meeting) -> Result<(), CommError>;
}

/// Copies `source` to `target`, memory of the host, unless they are the same.
///
/// # Safety
/// They have the same dtype and length, and are the same memory or do not overlap. While the call runs no one writes `source`, and
/// no one else reads or writes `target`.
pub(in crate::comm) unsafe fn copy(source: &Slice, target: &Slice) {
    if !same_place(source, target) {
        for (source, target) in source.paired_segments(target) {
            // SAFETY: the caller's promise is that of both accessors, and the memory is not the same.
            unsafe { target.as_mut_bytes().copy_from_slice(source.as_bytes()) };
        }
    }
}

/// Memory of the host.
pub(super) struct Host;

impl Site for Host {
    unsafe fn copy(&self, source: &Slice, target: &Slice) -> Result<(), CommError> {
        // SAFETY: the caller's promise.
        unsafe { copy(source, target) };
        Ok(())
    }

    unsafe fn sum_into(
        &self,
        sources: &[Slice],
        target: &Slice,
        scale: f32,
        accumulate: Accumulate,
    ) -> Result<(), CommError> {
        // SAFETY: the caller's promise.
        unsafe { reduce::sum_into(sources, target, scale, accumulate) };
        Ok(())
    }

    fn rendezvous(&self, meeting: &mut Meeting) -> Result<(), CommError> {
        meeting.rendezvous();
        Ok(())
    }
}
