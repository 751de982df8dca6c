//! The source of memory for flat buffers.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::fmt;
use std::num::NonZero;
use std::ptr::NonNull;

use super::ALIGN;
use crate::error::CommError;
use crate::spec::Dtype;

/// A kind of memory: the host's, or a device's.
///
/// # Safety
/// A block that [`Memory::allocate`] returns is of `bytes` bytes or more from [`Block::ptr`] on, aligned to [`ALIGN`], all of
/// them zero; until it is dropped they are the block's alone.
pub unsafe trait Memory: Send + Sync + fmt::Debug {
    /// Allocates `bytes` zero bytes, aligned to [`ALIGN`]. On a device they are zero in the order of its compute stream:
    /// another stream must wait for an event of it before it uses them.
    ///
    /// # Errors
    /// [`CommError::Memory`] if there is no such memory.
    fn allocate(&self, bytes: usize) -> Result<Box<dyn Block>, CommError>;

    /// Whether it is the host's, by its global allocator.
    fn is_host(&self) -> bool {
        false
    }
}

/// An allocation, given back when it is dropped, once all work that was told of to it is done.
///
/// # Safety
/// [`Block::ptr`] is the same at each call, and the memory there stays as it is until the block is dropped, whatever thread
/// it is reached from. It is that of the host, to be read and written, if [`Block::is_host`] says so, always or never.
pub unsafe trait Block: Send + Sync {
    /// Its first byte; of a device, an address there.
    fn ptr(&self) -> NonNull<u8>;

    /// Whether the host reads and writes it.
    fn is_host(&self) -> bool;

    /// Itself, for the streams of the device it is of.
    fn as_any(&self) -> &dyn Any;
}

/// Memory of this process.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostMemory;

/// The error of a buffer whose bytes do not fit a `usize`.
pub(super) fn too_large(dtype: Dtype, len: usize) -> CommError {
    let message = format!("{len} elements of {dtype} are more bytes than can be counted");
    CommError::Memory { device: "memory".into(), message }
}

struct HostBlock {
    ptr: NonNull<u8>,
    /// `None` if it is empty.
    layout: Option<Layout>,
}

// SAFETY: an allocation that it owns, and that the global allocator frees from any thread; it gives no access to the bytes.
unsafe impl Send for HostBlock {}
// SAFETY: as above; `&HostBlock` gives the address only.
unsafe impl Sync for HostBlock {}

// SAFETY: blocks are allocations of the global allocator of just these bytes and this alignment, zeroed; of none there is
// nothing to promise but the alignment.
unsafe impl Memory for HostMemory {
    fn is_host(&self) -> bool {
        true
    }

    fn allocate(&self, bytes: usize) -> Result<Box<dyn Block>, CommError> {
        if bytes == 0 {
            // Aligned like the others: empty slices of any dtype are made from it.
            let ptr = const { NonNull::without_provenance(NonZero::new(ALIGN).unwrap()) };
            return Ok(Box::new(HostBlock { ptr, layout: None }));
        }
        let layout = Layout::from_size_align(bytes, ALIGN).ok();
        // SAFETY: `layout` is of `bytes` bytes, which are not zero: that was returned above.
        let ptr = layout.and_then(|layout| NonNull::new(unsafe { alloc_zeroed(layout) }));
        match ptr {
            Some(ptr) => Ok(Box::new(HostBlock { ptr, layout })),
            None => {
                let message = format!("{bytes} bytes cannot be allocated");
                Err(CommError::Memory { device: "host".into(), message })
            }
        }
    }
}

// SAFETY: the address is a field that nothing changes, of memory of the allocator that is freed only by `drop`.
unsafe impl Block for HostBlock {
    fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    fn is_host(&self) -> bool {
        true
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        if let Some(layout) = self.layout {
            // SAFETY: `allocate` has allocated it with this very layout, and a block is dropped once.
            unsafe { dealloc(self.ptr.as_ptr(), layout) };
        }
    }
}
