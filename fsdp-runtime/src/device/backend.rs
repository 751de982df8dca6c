//! The backend of a rank: the device that it computes on.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::{HostMemory, Memory, Slice, Stream, cpu};
use crate::comm::CommError;

/// What a rank computes on: where candle's tensors are, the flat buffers beside them, the streams, and the way between
/// them and the host.
///
/// # Safety
/// [`Backend::download`] and [`Backend::upload`] touch no memory but what they are given, in the order of the compute stream;
/// they return when they are done with it. [`Backend::compute`] is one and the same stream at each call, and that of the ops
/// on [`Backend::tensors`].
pub unsafe trait Backend: Send + Sync + fmt::Debug {
    /// candle's device of it.
    fn tensors(&self) -> &candle_core::Device;

    /// Where flat buffers are.
    fn memory(&self) -> Arc<dyn Memory>;

    /// The stream that candle's ops run on.
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

    /// What it does by kernels of its own, where the CPU runs code of the host on its memory.
    fn kernels(&self) -> Option<&dyn Kernels> {
        None
    }
}

/// Kernels of a device, in the order of its compute stream.
///
/// # Safety
/// They touch no memory but the elements that they are given.
pub unsafe trait Kernels {
    /// One step of AdamW on the elements of `runs`; gradients are multiplied with `grad_scale` first.
    ///
    /// # Errors
    /// If the slices differ in length, the moments are not of f32, or a run is not inside; those of the stream.
    fn adamw(
        &self,
        runs: &[AdamWRun],
        grad_scale: f32,
        weights: &Slice,
        grads: &Slice,
        moments: [&Slice; 2],
    ) -> Result<(), CommError>;

    /// The sum of the squares of all elements of all slices, in f64. Blocks until it is there.
    ///
    /// # Errors
    /// Those of the stream.
    fn squared_norm(&self, slices: &[Slice]) -> Result<f64, CommError>;
}

/// A run of elements with the scalars of one step of AdamW, each rounded once.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamWRun {
    /// The elements.
    pub elements: Range<usize>,
    /// What they are updated with.
    pub step: AdamWScalars,
}

/// The scalars of one step of AdamW.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWScalars {
    /// `1 - lr * weight_decay`.
    pub decay: f32,
    /// Decay rate of the first moment.
    pub beta1: f32,
    /// `1 - beta1`.
    pub one_minus_beta1: f32,
    /// Decay rate of the second moment.
    pub beta2: f32,
    /// `1 - beta2`.
    pub one_minus_beta2: f32,
    /// `lr / (1 - beta1^step)`.
    pub step_size: f32,
    /// `sqrt(1 - beta2^step)`.
    pub correction2: f32,
    /// Added to the denominator.
    pub eps: f32,
}

/// The CPU: candle's tensors and flat buffers in host memory, side streams as threads.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuBackend;

// SAFETY: copies run here and now, on the slice and the bytes that they are given. Ops on candle's tensors run in the
// calling thread, and that is where a compute stream runs its work, each one of them.
unsafe impl Backend for CpuBackend {
    fn tensors(&self) -> &candle_core::Device {
        &candle_core::Device::Cpu
    }

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
