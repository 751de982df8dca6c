//! Flat device memory and typed slices of it.
//!
//! # Safety invariant of this module
//! A [`Buffer`] is one allocation, shared by `Arc`: it lives as long as any [`Slice`] of it. Its bytes are
//! reached only through the unsafe accessors of [`Slice`], whose callers promise that, for as long as the
//! returned reference lives, no other thread accesses the same elements in a conflicting way. The runtime
//! keeps that promise by ordering every access with stream order and events; collectives publish slices only
//! between their rendezvous.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use super::memory::{Block, HostMemory, Memory};
use crate::comm::CommError;
use crate::spec::Dtype;

/// Alignment of every allocation and of every parameter's start, in bytes: a cache line, and an AVX-512
/// register.
pub const ALIGN: usize = 64;

/// Called with the byte count of a buffer when it is freed.
pub type OnFree = Box<dyn Fn(usize) + Send + Sync>;

/// One allocation, 64-byte aligned and zero-filled at birth.
pub struct Buffer {
    ptr: NonNull<u8>,
    bytes: usize,
    /// Gives the memory back when it is dropped.
    block: Box<dyn Block>,
    on_free: Option<OnFree>,
}

// SAFETY: a Buffer is an owned allocation without thread affinity; access to its bytes is governed by the
// contract of `Slice::{as_slice, as_mut_slice}`.
unsafe impl Send for Buffer {}
// SAFETY: as above; `&Buffer` alone gives no access to the bytes.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Allocates `bytes` zero bytes of `memory`; `on_free` runs when the last slice is gone.
    ///
    /// # Errors
    /// Those of [`Memory::allocate`].
    pub fn new(memory: &dyn Memory, bytes: usize, on_free: Option<OnFree>) -> Result<Arc<Buffer>, CommError> {
        let block = memory.allocate(bytes)?;
        Ok(Arc::new(Buffer { ptr: block.ptr(), bytes, block, on_free }))
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

/// A range of elements of one dtype inside a [`Buffer`]; cloning it shares the memory.
#[derive(Clone, Debug)]
pub struct Slice {
    buffer: Arc<Buffer>,
    dtype: Dtype,
    start: usize,
    len: usize,
}

/// Rust types that can stand for a [`Dtype`].
pub trait Element: Copy + Send + Sync + bytemuck::Pod {
    /// The dtype it stands for.
    const DTYPE: Dtype;
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
    /// Those of [`Memory::allocate`].
    pub fn zeros_in(
        memory: &dyn Memory,
        dtype: Dtype,
        len: usize,
        on_free: Option<OnFree>,
    ) -> Result<Slice, CommError> {
        Ok(Slice { buffer: Buffer::new(memory, len * dtype.size(), on_free)?, dtype, start: 0, len })
    }

    /// A new buffer of `len` zeros in host memory, whole.
    ///
    /// # Panics
    /// If there is no such memory.
    pub fn zeros(dtype: Dtype, len: usize, on_free: Option<OnFree>) -> Slice {
        Self::zeros_in(&HostMemory, dtype, len, on_free).unwrap_or_else(|error| panic!("{error}"))
    }

    /// The allocation it is a part of, as its memory knows it.
    pub fn block(&self) -> &dyn Block {
        &*self.buffer.block
    }

    fn check_access<T: Element>(&self, how: &str) {
        assert_eq!(T::DTYPE, self.dtype, "a {} buffer {how} as {}", self.dtype, T::DTYPE);
        self.check_host();
    }

    fn check_host(&self) {
        assert!(self.buffer.block.is_host(), "memory of a device, accessed from the host");
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
        assert!(
            range.start <= range.end && range.end <= self.len,
            "slice {range:?} out of {} elements",
            self.len
        );
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
    #[cfg(feature = "cuda")]
    pub(crate) fn reinterpreted(&self, dtype: Dtype, len: usize) -> Slice {
        assert!(len * dtype.size() <= self.bytes(), "{len} elements of {dtype} in {} bytes", self.bytes());
        let start = self.start * self.dtype.size();
        assert!(start.is_multiple_of(dtype.size()), "a slice that begins inside an element");
        Slice { buffer: self.buffer.clone(), dtype, start: start / dtype.size(), len }
    }

    /// Address of the first element.
    pub fn as_ptr(&self) -> *mut u8 {
        // SAFETY: `start` and `len` are inside the allocation by construction of `zeros` and `range`.
        unsafe { self.buffer.ptr.as_ptr().add(self.start * self.dtype.size()) }
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
        // SAFETY: in bounds and initialised (zeros at birth), aligned because buffers are 64-byte aligned and
        // starts are whole elements; no concurrent writer by the caller's promise.
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
        assert!(range.start <= range.end && range.end <= self.len);
        self.check_access::<T>("read");
        // SAFETY: in bounds by the assertion, otherwise as in `as_slice`.
        unsafe { std::slice::from_raw_parts(self.as_ptr().cast::<T>().add(range.start), range.len()) }
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
        assert!(range.start <= range.end && range.end <= self.len);
        self.check_access::<T>("written");
        // SAFETY: in bounds by the assertion, otherwise as in `as_mut_slice`.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr().cast::<T>().add(range.start), range.len()) }
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
