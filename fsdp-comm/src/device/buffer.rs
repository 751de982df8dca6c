//! Flat device memory and typed slices of it.
//!
//! # Who answers for the memory
//! A [`Buffer`] is one allocation, shared by `Arc`: it lives as long as any [`Slice`] of it. A slice is a handle: clones
//! and ranges of it share the bytes, and ops and collectives that are given one use them later, on other threads. No type
//! says who uses which element when. So **making a slice is `unsafe`**, and its maker answers for all that is done with it,
//! its clones and its ranges:
//!
//! > Any two uses of an element, at least one of which writes it, come one after the other: by the order of a stream, by
//! > events between streams, by the meeting of the ranks in a collective, or by the order of the program.
//!
//! A use is an op on a stream or a collective, from the call until the stream has done it, or a reference that an
//! accessor has made, as long as it lives. Who makes slices gives them only to code of which it knows all uses, never to
//! code of the user: safe code that has no slice has no way to the memory. What takes slices (streams, backends,
//! communicators) checks all that it can see (lengths, dtypes, devices, overlaps of its arguments), and is safe to call:
//! the order is its slices' makers' affair. The accessors, which make references, are `unsafe` beside: how long a
//! reference lives is known only where it is made.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use super::memory::{Block, HostMemory, Memory, too_large};
use super::pieces::Pieces;
use crate::error::CommError;
use crate::spec::Dtype;

/// Alignment of every parameter's start in its bucket, and of every allocation that is not in pieces, in bytes: a cache
/// line, and an AVX-512 register.
pub const ALIGN: usize = 64;

/// Called with the byte count of a buffer when it is freed.
pub type OnFree = Box<dyn Fn(usize) + Send + Sync>;

/// One allocation, 64-byte aligned and zero-filled at birth, or one for each of several pieces that follow each other.
pub struct Buffer {
    memory: Backing,
    bytes: usize,
    on_free: Option<OnFree>,
}

enum Backing {
    Block {
        /// Of as many bytes as the buffer, for as long as `block` lives.
        ptr: NonNull<u8>,
        /// Gives the memory back when it is dropped.
        block: Box<dyn Block>,
    },
    Pieces(Pieces),
}

// SAFETY: only `ptr` keeps it from being `Send` by itself. It is of a block, which is `Send`, and by the contract of
// `Block` the memory is that of the block from any thread.
unsafe impl Send for Buffer {}
// SAFETY: as above; `&Buffer` gives the address and the length, which do not change, and no access to the bytes.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Allocates `bytes` zero bytes of `memory`; `on_free` runs when the last slice is gone.
    ///
    /// # Errors
    /// Those of [`Memory::allocate`].
    pub fn new(memory: &dyn Memory, bytes: usize, on_free: Option<OnFree>) -> Result<Arc<Buffer>, CommError> {
        let block = memory.allocate(bytes)?;
        Ok(Arc::new(Buffer { memory: Backing::Block { ptr: block.ptr(), block }, bytes, on_free }))
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(on_free) = &self.on_free {
            on_free(self.bytes);
        }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes)", self.bytes)
    }
}

/// A range of elements of one dtype inside a [`Buffer`]; cloning it shares the memory. Who makes one answers for the order
/// of its uses.
#[derive(Clone, Debug)]
pub struct Slice {
    buffer: Arc<Buffer>,
    dtype: Dtype,
    /// In elements of `dtype`; `(start + len) * dtype.size()` is at most `buffer.bytes`.
    start: usize,
    len: usize,
}

/// Rust types that can stand for a [`Dtype`]: `f32`, [`bf16`](half::bf16) and [`f16`](half::f16), and no others.
pub trait Element: Copy + Send + Sync + bytemuck::Pod + sealed::Sealed {
    /// The dtype it stands for.
    const DTYPE: Dtype;
}

mod sealed {
    /// Keeps other types from standing for a dtype, whose size is trusted.
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
}
impl Element for half::bf16 {
    const DTYPE: Dtype = Dtype::BF16;
}
impl Element for half::f16 {
    const DTYPE: Dtype = Dtype::F16;
}

impl Slice {
    /// A new buffer of `len` zeros in `memory`, whole.
    ///
    /// # Errors
    /// [`CommError::Memory`] if so many bytes cannot be counted, and those of [`Memory::allocate`].
    ///
    /// # Safety
    /// Any two uses of an element of it, at least one of which writes, come one after the other, as the module says.
    pub unsafe fn zeros_in(
        memory: &dyn Memory,
        dtype: Dtype,
        len: usize,
        on_free: Option<OnFree>,
    ) -> Result<Slice, CommError> {
        let bytes = len.checked_mul(dtype.size()).ok_or_else(|| too_large(dtype, len))?;
        Ok(Slice { buffer: Buffer::new(memory, bytes, on_free)?, dtype, start: 0, len })
    }

    /// A new buffer of `len` zeros in `memory`. In memory of the host it is in pieces that begin where `parts` begin, ranges of
    /// elements in order that do not overlap: the memory of each can be lent to a tensor.
    ///
    /// # Errors
    /// As for [`Slice::zeros_in`].
    ///
    /// # Safety
    /// As for [`Slice::zeros_in`].
    pub unsafe fn zeros_in_pieces(
        memory: &dyn Memory,
        dtype: Dtype,
        len: usize,
        parts: &[Range<usize>],
        on_free: Option<OnFree>,
    ) -> Result<Slice, CommError> {
        if !memory.is_host() {
            // SAFETY: the caller's promise.
            return unsafe { Slice::zeros_in(memory, dtype, len, on_free) };
        }
        let Some(pieces) = Pieces::zeros(dtype, len, parts) else {
            let message = format!("{len} elements of {dtype} cannot be allocated");
            return Err(CommError::Memory { device: "host".into(), message });
        };
        let bytes = len * dtype.size();
        let buffer = Arc::new(Buffer { memory: Backing::Pieces(pieces), bytes, on_free });
        Ok(Slice { buffer, dtype, start: 0, len })
    }

    /// `len` elements of memory that is there already.
    ///
    /// # Safety
    /// The block has memory of them all, aligned as they are. Otherwise as for [`Slice::zeros_in`], for all that know the
    /// memory: other processes too.
    #[cfg(target_os = "linux")]
    pub(crate) unsafe fn of_block(block: Box<dyn Block>, dtype: Dtype, len: usize) -> Slice {
        let bytes = len * dtype.size();
        let buffer = Buffer { memory: Backing::Block { ptr: block.ptr(), block }, bytes, on_free: None };
        Slice { buffer: Arc::new(buffer), dtype, start: 0, len }
    }

    /// A new buffer of `len` zeros in host memory, whole.
    ///
    /// # Panics
    /// If there is no such memory.
    ///
    /// # Safety
    /// As for [`Slice::zeros_in`].
    pub unsafe fn zeros(dtype: Dtype, len: usize, on_free: Option<OnFree>) -> Slice {
        // SAFETY: the caller's promise.
        let slice = unsafe { Self::zeros_in(&HostMemory, dtype, len, on_free) };
        slice.unwrap_or_else(|error| panic!("{error}"))
    }

    /// The allocation it is a part of, as its memory knows it; `None` if it is in pieces.
    pub fn block(&self) -> Option<&dyn Block> {
        match &self.buffer.memory {
            Backing::Block { block, .. } => Some(&**block),
            Backing::Pieces(_) => None,
        }
    }

    /// Whether the host reads and writes its memory.
    pub fn is_host(&self) -> bool {
        self.block().is_none_or(|block| block.is_host())
    }

    /// Its place in the buffer, in bytes.
    fn place(&self) -> Range<usize> {
        self.start * self.dtype.size()..(self.start + self.len) * self.dtype.size()
    }

    /// The parts of it that are contiguous in memory, in order: it is one, unless its buffer is in pieces.
    pub fn segments(&self) -> Vec<Slice> {
        let Backing::Pieces(pieces) = &self.buffer.memory else { return vec![self.clone()] };
        let (place, size) = (self.place(), self.dtype.size());
        let inside =
            |bytes: Range<usize>| (bytes.start - place.start) / size..(bytes.end - place.start) / size;
        pieces.cut(place.clone()).map(|bytes| self.range(inside(bytes))).collect()
    }

    /// The parts of two slices of one length that are contiguous in both, side by side.
    pub(crate) fn paired_segments(&self, other: &Slice) -> Vec<(Slice, Slice)> {
        let (mut first, mut pairs) = (0, Vec::new());
        for segment in self.segments() {
            let mut at = 0;
            for theirs in other.range(first..first + segment.len()).segments() {
                let ours = segment.range(at..at + theirs.len());
                at += theirs.len();
                pairs.push((ours, theirs));
            }
            first += segment.len();
        }
        pairs
    }

    /// Hands out the memory of a whole piece, without the padding behind it, as the `Vec` that it is. `None` if it is no piece,
    /// is of another dtype, or was handed out already. Until [`Slice::take_back`] its address is not to be had: who asks for
    /// it panics.
    ///
    /// # Safety
    /// No use of the elements that began before is still under way.
    pub unsafe fn lend<T: Element>(&self) -> Option<Vec<T>> {
        let Backing::Pieces(pieces) = &self.buffer.memory else { return None };
        // SAFETY: the caller's promise.
        unsafe { pieces.lend(self.place().start, self.len) }
    }

    /// Takes back what [`Slice::lend`] has handed out, and says whether it is the same memory, as long as before. If not, what
    /// came is dropped, and the piece has new memory, all zeros.
    ///
    /// # Panics
    /// If nothing is lent, or of another dtype.
    pub fn take_back<T: Element>(&self, returned: Option<Vec<T>>) -> bool {
        match &self.buffer.memory {
            Backing::Pieces(pieces) => pieces.take_back(self.place().start, returned),
            Backing::Block { .. } => panic!("memory that is not in pieces is never lent"),
        }
    }

    fn check_range(&self, range: &Range<usize>) {
        let inside = range.start <= range.end && range.end <= self.len;
        assert!(inside, "slice {range:?} out of {} elements", self.len);
    }

    /// Whether an element of `other` is an element of this slice too, or shares bytes with one.
    pub(crate) fn overlaps(&self, other: &Slice) -> bool {
        let (ours, theirs) = (self.place(), other.place());
        // Buffers do not share memory.
        Arc::ptr_eq(&self.buffer, &other.buffer) && ours.start.max(theirs.start) < ours.end.min(theirs.end)
    }

    /// Whether both are the very same memory.
    pub(crate) fn same_place(&self, other: &Slice) -> bool {
        Arc::ptr_eq(&self.buffer, &other.buffer) && self.place() == other.place()
    }

    fn check_access<T: Element>(&self, how: &str) {
        assert_eq!(T::DTYPE, self.dtype, "a {} buffer {how} as {}", self.dtype, T::DTYPE);
        self.check_host();
    }

    fn check_host(&self) {
        assert!(self.is_host(), "memory of a device, accessed from the host");
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if it has no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// The elements `range` of this slice.
    ///
    /// # Panics
    /// If `range` is not inside `0..len`.
    pub fn range(&self, range: Range<usize>) -> Slice {
        self.check_range(&range);
        Slice {
            buffer: self.buffer.clone(),
            dtype: self.dtype,
            start: self.start + range.start,
            len: range.len(),
        }
    }

    /// The first `len` elements of `dtype` in the same memory.
    ///
    /// # Panics
    /// If it has no room for them.
    pub fn reinterpreted(&self, dtype: Dtype, len: usize) -> Slice {
        let bytes = len.checked_mul(dtype.size());
        assert!(
            bytes.is_some_and(|bytes| bytes <= self.bytes()),
            "{len} elements of {dtype} in {} bytes",
            self.bytes()
        );
        let start = self.start * self.dtype.size();
        assert!(start.is_multiple_of(dtype.size()), "a slice that begins inside an element");
        Slice { buffer: self.buffer.clone(), dtype, start: start / dtype.size(), len }
    }

    /// Address of the first element.
    ///
    /// # Panics
    /// If the slice is not contiguous, or a tensor has its memory.
    pub fn as_ptr(&self) -> *mut u8 {
        self.address(0..self.len)
    }

    /// Address of the first of the elements `range`, which are inside and contiguous.
    fn address(&self, range: Range<usize>) -> *mut u8 {
        let at = |element| (self.start + element) * self.dtype.size();
        match &self.buffer.memory {
            // SAFETY: `start` elements are at most the bytes of the allocation, by the field's invariant: `zeros_in` begins
            // with 0 and a checked length, `range` and `reinterpreted` stay inside of what they are made of. The allocation
            // has these bytes by the contract of `Memory`.
            Backing::Block { ptr, .. } => unsafe { ptr.as_ptr().add(at(range.start)) },
            Backing::Pieces(pieces) => pieces.ptr(at(range.start)..at(range.end)),
        }
    }

    /// The elements, for reading.
    ///
    /// # Safety
    /// While the result lives no one writes these elements.
    ///
    /// # Panics
    /// If `T` is not the slice's dtype, or the memory is not the host's.
    pub unsafe fn as_slice<T: Element>(&self) -> &[T] {
        self.check_access::<T>("read");
        // SAFETY: `T` is the dtype's type, `Element` being sealed, so that `len` of it are inside the allocation as in
        // `as_ptr`; the memory is the host's; initialised (zeros at birth), and any bits are a `T`; aligned, because
        // allocations are aligned to 64 bytes, or to the dtype, and starts are whole elements; no writer by the caller's
        // promise. That it is contiguous, and no tensor's, is checked.
        unsafe { std::slice::from_raw_parts(self.as_ptr().cast::<T>(), self.len) }
    }

    /// The elements, for writing.
    ///
    /// # Safety
    /// While the result lives no one else reads or writes these elements.
    ///
    /// # Panics
    /// If `T` is not the slice's dtype, or the memory is not the host's.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn as_mut_slice<T: Element>(&self) -> &mut [T] {
        self.check_access::<T>("written");
        // SAFETY: as in `as_slice`; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr().cast::<T>(), self.len) }
    }

    /// The elements `range` of this slice, for reading.
    ///
    /// # Safety
    /// As for [`Slice::as_slice`], of these elements.
    ///
    /// # Panics
    /// If `T` is not the slice's dtype, `range` is not inside `0..len`, or the memory is not the host's.
    pub unsafe fn part_as_slice<T: Element>(&self, range: Range<usize>) -> &[T] {
        self.check_range(&range);
        self.check_access::<T>("read");
        // SAFETY: in bounds by the assertion, otherwise as in `as_slice`.
        unsafe { std::slice::from_raw_parts(self.address(range.clone()).cast::<T>(), range.len()) }
    }

    /// The elements `range` of this slice, for writing.
    ///
    /// # Safety
    /// As for [`Slice::as_mut_slice`], of these elements.
    ///
    /// # Panics
    /// As for [`Slice::part_as_slice`].
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part_as_mut_slice<T: Element>(&self, range: Range<usize>) -> &mut [T] {
        self.check_range(&range);
        self.check_access::<T>("written");
        // SAFETY: in bounds by the assertion, otherwise as in `as_mut_slice`.
        unsafe { std::slice::from_raw_parts_mut(self.address(range.clone()).cast::<T>(), range.len()) }
    }

    /// The bytes, for writing.
    ///
    /// # Safety
    /// As for [`Slice::as_mut_slice`].
    ///
    /// # Panics
    /// If the memory is not the host's.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn as_mut_bytes(&self) -> &mut [u8] {
        self.check_host();
        // SAFETY: as in `as_mut_slice`; any byte pattern is a valid `u8`.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.bytes()) }
    }

    /// The bytes, for reading.
    ///
    /// # Safety
    /// As for [`Slice::as_slice`].
    ///
    /// # Panics
    /// If the memory is not the host's.
    pub unsafe fn as_bytes(&self) -> &[u8] {
        self.check_host();
        // SAFETY: as in `as_slice`.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.bytes()) }
    }
}
