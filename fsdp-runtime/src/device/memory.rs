//! Where the memory of flat buffers comes from.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::fmt;
use std::num::NonZero;
use std::ptr::NonNull;

use super::ALIGN;
use crate::comm::CommError;

/// A kind of memory: the host's, or a device's.
pub trait Memory: Send + Sync + fmt::Debug {
    /// Allocates `bytes` zero bytes, aligned to [`ALIGN`]. On a device they are zero in the order of its compute stream:
    /// another stream must wait for an event of it before it uses them.
    ///
    /// # Errors
    /// [`CommError::Memory`] if there is no such memory.
    fn allocate(&self, bytes: usize) -> Result<Box<dyn Block>, CommError>;
}

/// An allocation, given back when it is dropped, once all work that was told of to it is done.
pub trait Block: Send + Sync {
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

struct HostBlock {
    ptr: NonNull<u8>,
    /// `None` if it is empty.
    layout: Option<Layout>,
}

// SAFETY: an owned allocation without thread affinity, which it gives no access to.
unsafe impl Send for HostBlock {}
// SAFETY: as above.
unsafe impl Sync for HostBlock {}

impl Memory for HostMemory {
    fn allocate(&self, bytes: usize) -> Result<Box<dyn Block>, CommError> {
        if bytes == 0 {
            // Aligned like the others: empty slices of any dtype are made from it.
            let ptr = const { NonNull::without_provenance(NonZero::new(ALIGN).unwrap()) };
            return Ok(Box::new(HostBlock { ptr, layout: None }));
        }
        let layout = Layout::from_size_align(bytes, ALIGN).ok();
        // SAFETY: `layout` has a non-zero size.
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

impl Block for HostBlock {
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
            // SAFETY: allocated with this very layout, and freed once.
            unsafe { dealloc(self.ptr.as_ptr(), layout) };
        }
    }
}
