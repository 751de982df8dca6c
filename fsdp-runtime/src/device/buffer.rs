//! Flat device memory and typed slices of it.
//!
//! # Safety invariant of this module
//! A [`Buffer`] is one allocation, shared by `Arc`: it lives as long as any [`Slice`] of it. Its bytes are
//! reached only through the unsafe accessors of [`Slice`], whose callers promise that, for as long as the
//! returned reference lives, no other thread accesses the same elements in a conflicting way. The runtime
//! keeps that promise by ordering every access with stream order and events; collectives publish slices only
//! between their rendezvous.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::spec::Dtype;

/// Alignment of every allocation and of every parameter's start, in bytes: a cache line, and an AVX-512
/// register.
pub const ALIGN: usize = 64;

/// Called with the byte count of a buffer when it is freed.
pub type OnFree = Box<dyn Fn(usize) + Send + Sync>;

/// One allocation of host memory, 64-byte aligned and zero-filled at birth.
pub struct Buffer {
    ptr: NonNull<u8>,
    /// What the allocator gave, in which `ptr` is the first aligned byte; nothing if there are no bytes.
    allocated: Option<NonNull<u8>>,
    bytes: usize,
    on_free: Option<OnFree>,
}

// SAFETY: a Buffer is an owned allocation without thread affinity; access to its bytes is governed by the
// contract of `Slice::{as_slice, as_mut_slice}`.
unsafe impl Send for Buffer {}
// SAFETY: as above; `&Buffer` alone gives no access to the bytes.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Allocates `bytes` zero bytes; `on_free` runs when the last slice is gone.
    pub fn new(bytes: usize, on_free: Option<OnFree>) -> Arc<Buffer> {
        if bytes == 0 {
            // Aligned like the others: empty slices of any dtype are made from it.
            let ptr = const { NonNull::without_provenance(std::num::NonZero::new(ALIGN).unwrap()) };
            return Arc::new(Buffer { ptr, allocated: None, bytes, on_free });
        }
        let layout = Self::layout(bytes);
        // SAFETY: `layout` has a non-zero size.
        let allocated = NonNull::new(unsafe { alloc_zeroed(layout) });
        let Some(base) = allocated else { handle_alloc_error(layout) };
        let offset = base.addr().get().next_multiple_of(ALIGN) - base.addr().get();
        // SAFETY: `layout` has `ALIGN` bytes more than are used, and the offset is below `ALIGN`.
        let ptr = unsafe { base.add(offset) };
        Arc::new(Buffer { ptr, allocated, bytes, on_free })
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Of what is allocated. The alignment is our own affair: asked for a larger one than usual, the system's allocator writes
    /// zeros itself, where untouched pages would be zeros that take no memory until they are used.
    fn layout(bytes: usize) -> Layout {
        let size = bytes.checked_add(ALIGN).expect("buffer size overflows isize");
        Layout::from_size_align(size, 1).expect("buffer size overflows isize")
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(allocated) = self.allocated {
            // SAFETY: allocated in `new` with this very layout, and freed once.
            unsafe { dealloc(allocated.as_ptr(), Self::layout(self.bytes)) };
        }
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
    /// A new buffer of `len` zeros, whole.
    pub fn zeros(dtype: Dtype, len: usize, on_free: Option<OnFree>) -> Slice {
        Slice { buffer: Buffer::new(len * dtype.size(), on_free), dtype, start: 0, len }
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
    /// If `T` is not the slice's dtype.
    pub unsafe fn as_slice<T: Element>(&self) -> &[T] {
        assert_eq!(T::DTYPE, self.dtype, "a {} buffer read as {}", self.dtype, T::DTYPE);
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
    /// If `T` is not the slice's dtype.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn as_mut_slice<T: Element>(&self) -> &mut [T] {
        assert_eq!(T::DTYPE, self.dtype, "a {} buffer written as {}", self.dtype, T::DTYPE);
        // SAFETY: as in `as_slice`; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr().cast::<T>(), self.len) }
    }

    /// The elements `range` of this slice, for reading.
    ///
    /// # Safety
    /// As for [`Slice::as_slice`], of these elements.
    ///
    /// # Panics
    /// If `T` is not the slice's dtype, or `range` is not inside `0..len`.
    pub unsafe fn part_as_slice<T: Element>(&self, range: Range<usize>) -> &[T] {
        assert!(range.start <= range.end && range.end <= self.len);
        assert_eq!(T::DTYPE, self.dtype, "a {} buffer read as {}", self.dtype, T::DTYPE);
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
        assert_eq!(T::DTYPE, self.dtype, "a {} buffer written as {}", self.dtype, T::DTYPE);
        // SAFETY: in bounds by the assertion, otherwise as in `as_mut_slice`.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr().cast::<T>().add(range.start), range.len()) }
    }

    /// The bytes, for writing.
    ///
    /// # Safety
    /// As for [`Slice::as_mut_slice`].
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn as_mut_bytes(&self) -> &mut [u8] {
        // SAFETY: as in `as_mut_slice`; any byte pattern is a valid `u8`.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.bytes()) }
    }

    /// The bytes, for reading.
    ///
    /// # Safety
    /// As for [`Slice::as_slice`].
    pub unsafe fn as_bytes(&self) -> &[u8] {
        // SAFETY: as in `as_slice`.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.bytes()) }
    }
}
