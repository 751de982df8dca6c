//! The runtime's streams and flat buffers, with memory that notices a race.
//!
//! Every access of a [`Slice`] is compared with the earlier ones of the same bytes: two of them, one a write,
//! that no chain of locks, messages and joins puts in an order are a race, even if in this schedule they were
//! far apart. This is the happens-before test of race detectors, on the vector clocks that the checker keeps.

#[path = "../../../fsdp-comm/src/device/activity.rs"]
mod activity;
#[path = "../../../fsdp-comm/src/device/average.rs"]
mod average;
#[path = "../../../fsdp-comm/src/device/backend.rs"]
mod backend;
#[path = "../../../fsdp-comm/src/device/buffer.rs"]
mod buffer;
#[path = "../../../fsdp-comm/src/device/clock.rs"]
mod clock;
#[path = "../../../fsdp-comm/src/device/cpu.rs"]
pub mod cpu;
#[path = "../../../fsdp-comm/src/device/elementwise.rs"]
mod elementwise;
#[path = "../../../fsdp-comm/src/device/memory.rs"]
mod memory;
#[path = "../../../fsdp-comm/src/device/pieces.rs"]
mod pieces;
#[path = "../../../fsdp-comm/src/device/cuda/range.rs"]
mod range;
mod shadow;
#[path = "../../../fsdp-comm/src/device/stream.rs"]
mod stream;
#[path = "../../../fsdp-comm/src/device/widen.rs"]
mod widen;

use std::ops::Range;
use std::sync::Arc;

pub(crate) use activity::Activity;
pub use average::move_average;
pub use backend::{Backend, CpuBackend};
pub use buffer::{ALIGN, Buffer, Element, OnFree};
pub use clock::now;
pub use elementwise::{Accumulate, Elementwise, Fill, Op, cast, fill, scale};
pub use memory::{Block, HostMemory, Memory};
pub(crate) use range::HostRange;
pub(crate) use shadow::take_race;
use shadow::{Kind, Shadow};
pub use stream::{DeviceStream, Event, Mark, Stream, Work};
pub use widen::{read_f32, update_f32};

use crate::error::CommError;
use crate::spec::Dtype;

/// The runtime's slice, with the record of its accesses.
#[derive(Clone, Debug)]
pub struct Slice {
    memory: buffer::Slice,
    shadow: Arc<Shadow>,
}

impl Slice {
    /// # Safety
    /// That of the runtime's slice, here and below.
    pub unsafe fn zeros_in(
        memory: &dyn Memory,
        dtype: Dtype,
        len: usize,
        on_free: Option<OnFree>,
    ) -> Result<Slice, CommError> {
        // SAFETY: the caller's promise.
        let memory = unsafe { buffer::Slice::zeros_in(memory, dtype, len, on_free) }?;
        let slice = Slice { memory, shadow: Arc::default() };
        slice.note(Kind::Write, 0..len);
        Ok(slice)
    }

    #[allow(clippy::missing_safety_doc)]
    pub unsafe fn zeros(dtype: Dtype, len: usize, on_free: Option<OnFree>) -> Slice {
        // SAFETY: the caller's promise.
        unsafe { Self::zeros_in(&HostMemory, dtype, len, on_free) }.unwrap()
    }

    /// No tensor has the memory: it can be in one piece.
    ///
    /// # Safety
    /// That of the runtime's slice.
    pub unsafe fn zeros_in_pieces(
        memory: &dyn Memory,
        dtype: Dtype,
        len: usize,
        _parts: &[Range<usize>],
        on_free: Option<OnFree>,
    ) -> Result<Slice, CommError> {
        // SAFETY: the caller's promise.
        unsafe { Self::zeros_in(memory, dtype, len, on_free) }
    }

    /// # Safety
    /// That of the runtime's slice.
    #[cfg(target_os = "linux")]
    pub(crate) unsafe fn of_block(block: Box<dyn Block>, dtype: Dtype, len: usize) -> Slice {
        // SAFETY: the caller's promise.
        Slice { memory: unsafe { buffer::Slice::of_block(block, dtype, len) }, shadow: Arc::default() }
    }

    pub fn reinterpreted(&self, dtype: Dtype, len: usize) -> Slice {
        Slice { memory: self.memory.reinterpreted(dtype, len), shadow: self.shadow.clone() }
    }

    pub fn segments(&self) -> Vec<Slice> {
        vec![self.clone()]
    }

    pub(crate) fn paired_segments(&self, other: &Slice) -> Vec<(Slice, Slice)> {
        vec![(self.clone(), other.clone())]
    }

    pub(crate) fn same_place(&self, other: &Slice) -> bool {
        self.memory.same_place(&other.memory)
    }

    /// The next write to the buffer panics.
    pub fn panic_at_next_write(&self) {
        self.shadow.panic_at_next_write();
    }

    pub fn dtype(&self) -> Dtype {
        self.memory.dtype()
    }

    pub fn len(&self) -> usize {
        self.memory.len()
    }

    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    pub fn range(&self, range: Range<usize>) -> Slice {
        Slice { memory: self.memory.range(range), shadow: self.shadow.clone() }
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    pub fn overlaps(&self, other: &Slice) -> bool {
        self.memory.overlaps(&other.memory)
    }

    #[allow(clippy::missing_safety_doc)]
    pub unsafe fn as_slice<T: Element>(&self) -> &[T] {
        self.note(Kind::Read, 0..self.len());
        // SAFETY: the caller's promise.
        unsafe { self.memory.as_slice() }
    }

    #[allow(clippy::mut_from_ref, clippy::missing_safety_doc)]
    pub unsafe fn as_mut_slice<T: Element>(&self) -> &mut [T] {
        self.note(Kind::Write, 0..self.len());
        // SAFETY: the caller's promise.
        unsafe { self.memory.as_mut_slice() }
    }

    #[allow(clippy::missing_safety_doc)]
    pub unsafe fn part_as_slice<T: Element>(&self, range: Range<usize>) -> &[T] {
        self.note(Kind::Read, range.clone());
        // SAFETY: the caller's promise.
        unsafe { self.memory.part_as_slice(range) }
    }

    #[allow(clippy::mut_from_ref, clippy::missing_safety_doc)]
    pub unsafe fn part_as_mut_slice<T: Element>(&self, range: Range<usize>) -> &mut [T] {
        self.note(Kind::Write, range.clone());
        // SAFETY: the caller's promise.
        unsafe { self.memory.part_as_mut_slice(range) }
    }

    #[allow(clippy::mut_from_ref, clippy::missing_safety_doc)]
    pub unsafe fn as_mut_bytes(&self) -> &mut [u8] {
        self.note(Kind::Write, 0..self.len());
        // SAFETY: the caller's promise.
        unsafe { self.memory.as_mut_bytes() }
    }

    #[allow(clippy::missing_safety_doc)]
    pub unsafe fn as_bytes(&self) -> &[u8] {
        self.note(Kind::Read, 0..self.len());
        // SAFETY: the caller's promise.
        unsafe { self.memory.as_bytes() }
    }

    fn note(&self, kind: Kind, elements: Range<usize>) {
        let (start, size) = (self.as_ptr() as usize, self.dtype().size());
        self.shadow.note(kind, start + elements.start * size..start + elements.end * size);
    }
}
