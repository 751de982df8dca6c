//! Work that is captured as a graph instead of being done, and launched as often as wanted.
//!
//! While a device captures, its streams tell the driver what to do and nothing happens. What was done before is over by
//! then, and what is done after a launch comes behind it on the compute stream; so an event of the one side means nothing
//! on the other, and a wait for it is none.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cudarc::driver as cuda;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use parking_lot::Mutex;

use super::device::CudaDevice;
use super::error::on_stream;
use super::stream::CudaStream;
use crate::device::{Slice, Stream};
use crate::error::CommError;

/// Work of a device's streams, captured once. It may run again and again, one launch at a time.
///
/// It reads and writes memory at the addresses of the capture.
pub struct CudaWork {
    graph: Mutex<cuda::CudaGraph>,
    compute: Arc<CudaStream>,
}

impl std::fmt::Debug for CudaWork {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaWork on {}", self.compute.device().name())
    }
}

// SAFETY: a graph's handles have no thread affinity; the driver's calls on them may be made from any thread, one at a time,
// which the lock sees to.
unsafe impl Send for CudaWork {}
// SAFETY: as above.
unsafe impl Sync for CudaWork {}

/// A capture that has begun. Dropped, it is given up.
struct Capture<'a> {
    device: &'a CudaDevice,
    stream: Arc<cuda::CudaStream>,
    ended: bool,
}

impl Capture<'_> {
    /// Ends it, and lets go of what was freed meanwhile.
    fn end(&mut self) -> Result<Option<cuda::CudaGraph>, cuda::DriverError> {
        self.ended = true;
        // Memory that a launch allocates and the work does not free, a later launch frees.
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        // What drops have met in a void capture would keep it from being ended, and later calls from being made.
        let context = self.stream.context();
        let _ = context.check_err();
        let graph = self.stream.end_capture(flags);
        let _ = context.check_err();
        self.device.state().capture.active.store(false, Ordering::Relaxed);
        // Blocks that could not be freed during the capture are now.
        drop(std::mem::take(&mut *self.device.state().capture.kept.lock()));
        graph
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if !self.ended {
            // Given up: what the driver has to say of it was said by the call that failed.
            let _ = self.end();
        }
    }
}

impl CudaStream {
    /// Captures what `record` enqueues on this stream, the compute stream, and on `sides`, which are of the same device.
    /// All of them have to be idle before.
    ///
    /// # Errors
    /// Those of `record` and of the driver; [`CommError::Stream`] if memory that was allocated meanwhile outlives the
    /// capture.
    pub fn capture<T, E: From<CommError>>(
        self: &Arc<Self>,
        sides: &[Arc<dyn Stream>],
        record: impl FnOnce() -> Result<T, E>,
    ) -> Result<(T, CudaWork), E> {
        let device = self.device();
        device.check()?;
        let failed = |call: &'static str| on_stream(self.name(), call);
        // Other threads may go on with calls that a capture forbids to this one.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.cuda_stream().begin_capture(mode).map_err(failed("beginning a capture"))?;
        device.state().capture.active.store(true, Ordering::Relaxed);
        device.state().capture.blocks.store(0, Ordering::Relaxed);
        let mut capture = Capture { device, stream: self.cuda_stream().clone(), ended: false };
        let value = record()?;
        // Work of a side stream is a part of it only if the compute stream comes to wait for it.
        for side in sides {
            self.wait(&side.record())?;
        }
        let left = device.state().capture.blocks.load(Ordering::Relaxed);
        let graph = capture.end().map_err(failed("ending a capture"))?;
        if left != 0 {
            let message = format!("{left} buffers that were allocated in a captured step are held after it");
            return Err(CommError::Stream { stream: self.name().to_owned(), message }.into());
        }
        let Some(graph) = graph else {
            let message = "a call in a captured step has made it void".to_owned();
            return Err(CommError::Stream { stream: self.name().to_owned(), message }.into());
        };
        graph.upload().map_err(failed("uploading a graph"))?;
        Ok((value, CudaWork { graph: Mutex::new(graph), compute: self.clone() }))
    }
}

impl CudaWork {
    /// Enqueues the work on the compute stream, with `slices`.
    ///
    /// # Errors
    /// Those of [`CudaStream::enqueue`].
    ///
    /// # Safety
    /// All memory that the captured work reads and writes is still there, and no one else uses it in the order of the
    /// compute stream until the launch is over.
    pub unsafe fn launch(&self, slices: &[&Slice]) -> Result<(), CommError> {
        let graph = self.graph.lock();
        self.compute.enqueue("launching a graph", slices, |_| graph.launch())
    }
}
