//! The backend of a rank: the device that it computes on.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::{HostMemory, Memory, Slice, Stream, cpu};
use crate::error::CommError;

/// What a rank computes on: where the flat buffers are, the streams, and the way between the buffers and the host.
///
/// # Safety
/// [`Backend::download`] and [`Backend::upload`] touch no memory but what they are given, in the order of the compute stream;
/// they return when they are done with it. [`Backend::compute`] is one and the same stream at each call, and that of the ops
/// on tensors of the device, whatever library they are of.
pub unsafe trait Backend: Send + Sync + fmt::Debug {
    /// Where flat buffers are.
    fn memory(&self) -> Arc<dyn Memory>;

    /// The stream that ops on tensors run on.
    fn compute(&self) -> Arc<dyn Stream>;

    /// A stream beside it for communication, served before it.
    ///
    /// # Errors
    /// Those of the device.
    fn side(&self, name: String) -> Result<Arc<dyn Stream>, CommError>;

    /// Copies the elements of `from` to the host, as bytes, in the order of the compute stream. Blocks until it is done.
    ///
    /// # Errors
    /// Those of the stream.
    ///
    /// # Panics
    /// If the lengths differ.
    fn download(&self, from: &Slice, to: &mut [u8]) -> Result<(), CommError>;

    /// Copies elements from the host, as bytes, to `to`, in the order of the compute stream. When it returns, `from` may
    /// change.
    ///
    /// # Errors
    /// Those of the stream.
    ///
    /// # Panics
    /// If the lengths differ.
    fn upload(&self, from: &[u8], to: &Slice) -> Result<(), CommError>;

    /// Itself, for what only one kind of device can do.
    fn as_any(&self) -> &dyn Any;

    /// What the crate that has tensors keeps with the device, for it to find again; `None` where tensors are in memory of the
    /// host, and the host computes on them.
    fn attached(&self) -> Option<&dyn Any> {
        None
    }
}

/// The CPU: tensors and flat buffers in host memory, side streams as threads.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuBackend;

// SAFETY: copies run here and now, on the slice and the bytes that they are given. Ops on tensors run in the
// calling thread, and that is where a compute stream runs its work, each one of them.
unsafe impl Backend for CpuBackend {
    fn memory(&self) -> Arc<dyn Memory> {
        Arc::new(HostMemory)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn compute(&self) -> Arc<dyn Stream> {
        cpu::ComputeStream::new("compute")
    }

    fn side(&self, name: String) -> Result<Arc<dyn Stream>, CommError> {
        Ok(cpu::CpuStream::spawn(name))
    }

    fn download(&self, from: &Slice, to: &mut [u8]) -> Result<(), CommError> {
        // SAFETY: this is the copy's place in the order of the compute stream, which is this thread's; those who made
        // `from` have put the writes of it before or behind.
        to.copy_from_slice(unsafe { from.as_bytes() });
        Ok(())
    }

    fn upload(&self, from: &[u8], to: &Slice) -> Result<(), CommError> {
        // SAFETY: as in `download`, for all uses of `to`.
        unsafe { to.as_mut_bytes() }.copy_from_slice(from);
        Ok(())
    }
}
