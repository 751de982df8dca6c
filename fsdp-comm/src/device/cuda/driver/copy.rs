//! Copies between the host and a device.

use cudarc::driver as cuda;

use super::block::{Place, place};
use super::stream::CudaStream;
use crate::device::{Slice, Stream};
use crate::error::CommError;

impl CudaStream {
    /// `to = from`, in stream order; one of them or both are memory of the device, the other one is
    /// [pinned](super::PinnedMemory).
    ///
    /// # Errors
    /// [`CommError::Stream`] if their dtypes or lengths differ, they overlap, or memory is of another kind; those of the
    /// driver.
    pub fn copy(&self, from: &Slice, to: &Slice) -> Result<(), CommError> {
        let refuse = |message: String| CommError::Stream { stream: self.name().to_owned(), message };
        if (from.dtype(), from.len()) != (to.dtype(), to.len()) {
            return Err(refuse(format!(
                "a copy of {} elements of {} to {} of {}",
                from.len(),
                from.dtype(),
                to.len(),
                to.dtype()
            )));
        }
        if from.overlaps(to) {
            return Err(refuse("a copy between slices that overlap".to_owned()));
        }
        let places = (place(self.device(), from), place(self.device(), to));
        if !matches!(
            places,
            (Place::Device, Place::Device) | (Place::Pinned, Place::Device) | (Place::Device, Place::Pinned)
        ) {
            return Err(refuse(format!("a copy of {:?} memory to {:?} memory", places.0, places.1)));
        }
        let (source, target, bytes) = (address(from), address(to), from.bytes());
        if bytes == 0 {
            return Ok(());
        }
        self.enqueue("copying", &[from, to], |stream| {
            let stream = stream.cu_stream();
            // SAFETY: both ranges are inside of their allocations, and of `bytes` bytes, the lengths and dtypes being equal;
            // the allocations are there until the copy is done, by the use that `enqueue` notes. This is the copy's place
            // in the order of the stream, which those who made the slices have put other uses before or behind.
            unsafe {
                match places {
                    (Place::Pinned, _) => {
                        cuda::sys::cuMemcpyHtoDAsync_v2(target, from.as_ptr().cast(), bytes, stream).result()
                    }
                    (_, Place::Pinned) => {
                        cuda::sys::cuMemcpyDtoHAsync_v2(to.as_ptr().cast(), source, bytes, stream).result()
                    }
                    _ => cuda::result::memcpy_dtod_async(target, source, bytes, stream),
                }
            }
        })
    }
}

/// The driver's pointer to a slice.
pub(super) fn address(slice: &Slice) -> u64 {
    slice.as_ptr().addr() as u64
}
