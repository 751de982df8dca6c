//! Events, and marks that take the time.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver as cuda;

use super::device::CudaDevice;
use super::error::on_stream;
use crate::device::{Event, Mark, now};
use crate::error::CommError;

/// A point in a stream's order.
pub struct CudaEvent {
    pub(super) event: Arc<cuda::CudaEvent>,
    pub(super) device: CudaDevice,
    pub(super) stream: Arc<str>,
    /// It was recorded in a capture, and is a part of the graph.
    pub(super) captured: bool,
}

impl std::fmt::Debug for CudaEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaEvent").finish_non_exhaustive()
    }
}

impl CudaEvent {
    /// Whether the device has passed it.
    pub(crate) fn passed(&self) -> Result<bool, CommError> {
        if self.captured {
            return Ok(true);
        }
        let bound = self.device.state().context.bind_to_thread();
        let passed = bound.and_then(|()| self.event.try_is_complete());
        passed.map_err(on_stream(&self.stream, "waiting for an event"))
    }
}

// SAFETY: the driver's event is recorded where it is made, and complete when the stream has passed it.
unsafe impl Event for CudaEvent {
    fn synchronize(&self) -> Result<(), CommError> {
        /// Polls without a pause: some milliseconds.
        const SPINS: u32 = 20_000;
        const PAUSE: Duration = Duration::from_micros(50);
        if self.device.is_capturing() {
            let message =
                "the host cannot wait for the device in a step that is captured as a graph".to_owned();
            return Err(CommError::Stream { stream: self.stream.to_string(), message });
        }
        let mut polls = 0;
        loop {
            self.device.check()?;
            match self.passed() {
                // What failed before this point has been said by now.
                Ok(true) => return self.device.check(),
                Ok(false) => {}
                Err(error) => {
                    self.device.fail(error.clone());
                    return Err(error);
                }
            }
            polls += 1;
            if polls < SPINS { std::thread::yield_now() } else { std::thread::sleep(PAUSE) }
        }
    }

    fn is_complete(&self) -> bool {
        self.device.check().is_err() || self.passed().unwrap_or(true)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// An event of a stream that has failed already.
pub(super) struct Failed(pub CommError);

// SAFETY: a device that has failed runs nothing more of what it was given.
unsafe impl Event for Failed {
    fn synchronize(&self) -> Result<(), CommError> {
        Err(self.0.clone())
    }

    fn is_complete(&self) -> bool {
        true
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// An event of known time, that others are measured from.
pub(super) struct Origin {
    event: cuda::CudaEvent,
    nanos: u64,
}

/// The driver gives times as f32 milliseconds: from an origin this far away they are good to 60 ns.
const ORIGIN_AGE: u64 = 1_000_000_000;

pub(super) struct CudaMark {
    event: cuda::CudaEvent,
    origin: Arc<Origin>,
}

impl CudaMark {
    /// At the present end of `stream`.
    pub fn record(device: &CudaDevice, stream: &cuda::CudaStream) -> Result<CudaMark, cuda::DriverError> {
        let origin = Origin::of(device)?;
        Ok(CudaMark { event: stream.record_event(Some(TIMED))?, origin })
    }
}

const TIMED: cuda::sys::CUevent_flags = cuda::sys::CUevent_flags::CU_EVENT_DEFAULT;

impl Origin {
    /// The present origin. One that has grown old is followed by an event of its device that it has measured.
    fn of(device: &CudaDevice) -> Result<Arc<Origin>, cuda::DriverError> {
        let mut origin = device.state().origin.lock();
        if let Some(origin) = &*origin
            && now() - origin.nanos < ORIGIN_AGE
        {
            return Ok(origin.clone());
        }
        let event = device.state().compute.record_event(Some(TIMED))?;
        let nanos = match &*origin {
            // Its place in the past's order, once the device is there.
            Some(past) if event.try_is_complete()? => past.measure(&event)?,
            Some(past) => return Ok(past.clone()),
            None => {
                event.synchronize()?;
                now()
            }
        };
        Ok(origin.insert(Arc::new(Origin { event, nanos })).clone())
    }

    fn measure(&self, event: &cuda::CudaEvent) -> Result<u64, cuda::DriverError> {
        let millis = f64::from(self.event.elapsed_ms(event)?);
        Ok(self.nanos.saturating_add_signed((millis * 1e6) as i64))
    }
}

impl Mark for CudaMark {
    fn time(&self) -> Option<u64> {
        self.event.context().bind_to_thread().ok()?;
        if !self.event.try_is_complete().ok()? {
            return None;
        }
        self.origin.measure(&self.event).ok()
    }
}
