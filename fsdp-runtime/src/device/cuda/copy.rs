//! Copies between the host and a device.

use cudarc::driver as cuda;

use super::block::{Place, place};
use super::stream::CudaStream;
use crate::comm::CommError;
use crate::device::{Slice, Stream};

impl CudaStream {
    /// `to = from`, in stream order; one of them or both are memory of the device, the other one is
    /// [pinned](super::PinnedMemory). They have the same dtype and length.
    ///
    /// The caller's stream order must make the stream the only one that uses `to`, and no one may write `from`; the host
    /// waits for an event before it touches either.
    ///
    /// # Errors
    /// [`CommError::Stream`] if they do not fit, or memory is of another kind; those of the driver.
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
        let places = (place(self.device(), from), place(self.device(), to));
        let (source, target, bytes) = (address(from), address(to), from.bytes());
        if bytes == 0 {
            return Ok(());
        }
        self.try_enqueue(&[from, to], |stream| {
            let stream = stream.cu_stream();
            // SAFETY: both ranges are alive until the copy is done, by the use that is noted, and as long as the memory
            // that they are of; the caller's stream order is what is asked for here.
            let copied = unsafe {
                match places {
                    (Place::Device, Place::Device) => {
                        cuda::result::memcpy_dtod_async(target, source, bytes, stream)
                    }
                    (Place::Pinned, Place::Device) => {
                        cuda::sys::cuMemcpyHtoDAsync_v2(target, from.as_ptr().cast(), bytes, stream).result()
                    }
                    (Place::Device, Place::Pinned) => {
                        cuda::sys::cuMemcpyDtoHAsync_v2(to.as_ptr().cast(), source, bytes, stream).result()
                    }
                    (from, to) => return Err(refuse(format!("a copy of {from:?} memory to {to:?} memory"))),
                }
            };
            copied.map_err(super::error::on_stream(self.name(), "copying"))
        })
    }
}

/// The driver's pointer to a slice.
pub(super) fn address(slice: &Slice) -> u64 {
    slice.as_ptr().addr() as u64
}
