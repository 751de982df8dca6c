//! Streams of the driver.

use std::any::Any;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use cudarc::driver as cuda;

use super::block::{note_use, retire};
use super::device::CudaDevice;
use super::error::on_stream;
use super::event::{CudaEvent, CudaMark, Failed};
use crate::device::{Accumulate, DeviceStream, Elementwise, Event, Mark, Slice, Stream, Work};
use crate::error::{CommError, panic_text};

/// How a stream is served when there is more work than the device can do at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// As computation is.
    Normal,
    /// Before it: for communication, which others wait for.
    High,
}

/// A stream of a device. Submitting returns at once; [`CudaDevice::check`] and events tell of failures.
pub struct CudaStream {
    name: Arc<str>,
    device: CudaDevice,
    stream: Arc<cuda::CudaStream>,
}

impl std::fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaStream").field("name", &self.name).finish_non_exhaustive()
    }
}

impl CudaStream {
    pub(super) fn new(device: CudaDevice, stream: Arc<cuda::CudaStream>, name: String) -> Arc<CudaStream> {
        Arc::new(CudaStream { name: name.into(), device, stream })
    }

    /// The device it is of.
    pub fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// The driver's stream.
    pub fn cuda_stream(&self) -> &Arc<cuda::CudaStream> {
        &self.stream
    }

    /// Whether what is submitted becomes part of a graph instead of being done.
    #[cfg(feature = "nccl")]
    pub(crate) fn is_capturing(&self) -> Result<bool, CommError> {
        let status = self.stream.capture_status().map_err(on_stream(&self.name, "asking for its capture"))?;
        Ok(status != cuda::sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Whether it takes part in the capture of its device; a failing driver says so in the next call.
    fn has_joined(&self) -> bool {
        const NONE: cuda::sys::CUstreamCaptureStatus =
            cuda::sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        self.stream.capture_status().is_ok_and(|status| status != NONE)
    }

    /// Does what `enqueue` does on the driver's stream, in its order, with `slices`: they are not given back before it is
    /// done.
    ///
    /// # Errors
    /// An earlier failure of the device, or that of `call`, which is one of the device from then on.
    pub fn enqueue(
        &self,
        call: &str,
        slices: &[&Slice],
        enqueue: impl FnOnce(&cuda::CudaStream) -> Result<(), cuda::DriverError>,
    ) -> Result<(), CommError> {
        self.try_enqueue(slices, |stream| enqueue(stream).map_err(on_stream(&self.name, call)))
    }

    /// The same with errors of other kinds.
    ///
    /// # Errors
    /// As for [`CudaStream::enqueue`].
    pub fn try_enqueue(
        &self,
        slices: &[&Slice],
        enqueue: impl FnOnce(&cuda::CudaStream) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        self.device.check()?;
        let bound = self.device.state().context.bind_to_thread();
        let bound = bound.map_err(on_stream(&self.name, "binding the context"));
        let enqueued = bound.and_then(|()| enqueue(&self.stream));
        let enqueued = enqueued.and_then(|()| {
            note_use(&self.stream, slices).map_err(on_stream(&self.name, "recording an event"))
        });
        enqueued.inspect_err(|error| self.device.fail(error.clone()))
    }
}

/// What the driver calls a host function with.
struct HostCall {
    work: Work,
    stream: Arc<str>,
    device: CudaDevice,
}

/// Runs on a thread of the driver.
///
/// # Safety
/// `call` is a `Box<HostCall>` that was given away.
unsafe extern "C" fn run_host_call(call: *mut c_void) {
    // SAFETY: the caller's promise.
    let HostCall { work, stream, device } = *unsafe { Box::from_raw(call.cast::<HostCall>()) };
    let outcome = catch_unwind(AssertUnwindSafe(|| match device.check() {
        Ok(()) => work(),
        // What unrun work holds may act on being dropped: collectives tell their peers.
        Err(_) => {
            drop(work);
            Ok(())
        }
    }));
    let outcome = outcome.unwrap_or_else(|payload| {
        let message = format!("work panicked: {}", panic_text(payload.as_ref()));
        Err(CommError::Stream { stream: stream.to_string(), message })
    });
    if let Err(error) = outcome {
        device.fail(error);
    }
}

// SAFETY: the driver's streams run work in order, one after the other, and wait for events there; host functions are called
// in that order too.
unsafe impl Stream for CudaStream {
    fn name(&self) -> &str {
        &self.name
    }

    fn submit(&self, work: Work) -> Result<(), CommError> {
        let call = HostCall { work, stream: self.name.clone(), device: self.device.clone() };
        let call = Box::into_raw(Box::new(call)).cast::<c_void>();
        let enqueued = self.enqueue("calling the host", &[], |stream| {
            // SAFETY: the driver calls it once, with the box given away here.
            unsafe { cuda::result::stream::launch_host_function(stream.cu_stream(), run_host_call, call) }
        });
        enqueued.inspect_err(|_| {
            // SAFETY: the driver did not take it.
            drop(unsafe { Box::from_raw(call.cast::<HostCall>()) });
        })
    }

    fn elementwise(&self, op: Elementwise) -> Result<(), CommError> {
        self.device.state().kernels.elementwise(self, op)
    }

    fn record(&self) -> Arc<dyn Event> {
        let recorded = self.device.check().and_then(|()| {
            let event = self.stream.record_event(None).map_err(on_stream(&self.name, "recording an event"));
            event.inspect_err(|error| self.device.fail(error.clone()))
        });
        match recorded {
            Ok(event) => {
                let (device, stream) = (self.device.clone(), self.name.clone());
                let captured = self.device.is_capturing() && self.has_joined();
                Arc::new(CudaEvent { event: Arc::new(event), device, stream, captured })
            }
            Err(error) => Arc::new(Failed(error)),
        }
    }

    fn mark(&self) -> Result<Arc<dyn Mark>, CommError> {
        self.device.check()?;
        if self.device.is_capturing() {
            let message = "no times are taken in a step that is captured as a graph".to_owned();
            return Err(CommError::Stream { stream: self.name.to_string(), message });
        }
        let mark = CudaMark::record(&self.device, &self.stream);
        let mark = mark.map_err(on_stream(&self.name, "taking the time"));
        Ok(Arc::new(mark.inspect_err(|error| self.device.fail(error.clone()))?))
    }

    fn wait(&self, event: &Arc<dyn Event>) -> Result<(), CommError> {
        match event.as_any().downcast_ref::<CudaEvent>() {
            // What a capture has recorded is of no meaning outside of it, and what came before it is over.
            Some(event) if event.captured != self.device.is_capturing() => self.device.check(),
            Some(event) => self.enqueue("waiting for an event", &[], |stream| stream.wait(&event.event)),
            // Of the host, or a failure: the device cannot wait for it.
            None => event.synchronize().inspect_err(|error| self.device.fail(error.clone())),
        }
    }

    unsafe fn retire(&self, slices: &[Slice]) {
        // SAFETY: the caller's promise.
        unsafe { retire(&self.stream, slices) };
    }

    fn on_device(&self) -> Option<&dyn DeviceStream> {
        Some(self)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

// SAFETY: the kernel of sums is given the addresses of the slices, which it is checked to fit, and `try_enqueue` notes them as
// in use; so it does without work.
unsafe impl DeviceStream for CudaStream {
    fn device_name(&self) -> &str {
        self.device.name()
    }

    fn check_device(&self) -> Result<(), CommError> {
        self.device.check()
    }

    fn note_use(&self, slices: &[Slice]) -> Result<(), CommError> {
        self.try_enqueue(&slices.iter().collect::<Vec<_>>(), |_| Ok(()))
    }

    fn sum_ranks(
        &self,
        sources: &[Slice],
        out: &Slice,
        scale: f32,
        accumulate: Accumulate,
    ) -> Result<(), CommError> {
        CudaStream::sum_ranks(self, sources, out, scale, accumulate)
    }
}
