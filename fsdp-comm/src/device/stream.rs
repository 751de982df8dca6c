//! The traits of streams and events.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use super::{Accumulate, Elementwise, Slice};
use crate::error::CommError;

/// A point in a stream's order.
///
/// # Safety
/// [`Event::synchronize`] returns, and [`Event::is_complete`] is true, only when the work that was submitted before the point
/// is over: done, failed, or dropped without being run. What it did to memory is then seen by the caller. It stays so.
pub unsafe trait Event: Send + Sync {
    /// Blocks the calling host thread until the stream has passed this point.
    ///
    /// # Errors
    /// The failure of the stream up to here: work that failed, a collective that was aborted.
    fn synchronize(&self) -> Result<(), CommError>;

    /// True if the point was passed (also when the stream has failed).
    fn is_complete(&self) -> bool;

    /// Itself, for streams of the same kind.
    fn as_any(&self) -> &dyn Any;
}

/// A point in a stream's order whose time is taken.
pub trait Mark: Send + Sync {
    /// When it was passed, in nanoseconds of the process's trace clock; `None` if it is still to come.
    fn time(&self) -> Option<u64>;
}

/// Work submitted to a stream: a CPU stream's own, or what the host does in the order of a device's stream.
pub type Work = Box<dyn FnOnce() -> Result<(), CommError> + Send>;

/// An in-order queue of device work.
///
/// # Safety
/// Work on memory is ordered by streams. Work runs once or never, after all work whose submission came before in the
/// order of the program, and not beside it; [`Stream::wait`] orders what is submitted later after the event;
/// [`Stream::record`] returns an event of this stream; [`Stream::elementwise`] touches no memory but what its op names.
pub unsafe trait Stream: Send + Sync {
    /// Name of the lane in traces: `compute`, `all-gather`, `reduce`.
    fn name(&self) -> &str;

    /// Runs `work` on the host after all that was submitted before, and before what is submitted after. On the compute
    /// stream of the CPU it runs at once, in the calling thread. CUDA refuses calls of the device that it makes.
    ///
    /// # Errors
    /// On a stream that runs in the calling thread, those of `work`; otherwise they surface at the next
    /// event.
    fn submit(&self, work: Work) -> Result<(), CommError>;

    /// Does `op` after all that was submitted before.
    ///
    /// # Errors
    /// As for [`Stream::submit`].
    fn elementwise(&self, op: Elementwise) -> Result<(), CommError> {
        self.submit(Box::new(move || {
            // SAFETY: this is the op's place in the order of the stream, which those who made the slices have put
            // all other uses of them before or behind.
            unsafe { op.run() };
            Ok(())
        }))
    }

    /// Marks the present end of the stream.
    fn record(&self) -> Arc<dyn Event>;

    /// Takes the time at which the present end of the stream is passed.
    ///
    /// # Errors
    /// As for [`Stream::submit`].
    fn mark(&self) -> Result<Arc<dyn Mark>, CommError> {
        let mark = Arc::new(HostMark::default());
        let passed = mark.clone();
        self.submit(Box::new(move || {
            passed.0.get_or_init(super::now);
            Ok(())
        }))?;
        Ok(mark)
    }

    /// Work submitted from now on runs after `event`. On a stream that runs in the calling thread this blocks
    /// it.
    ///
    /// # Errors
    /// On such a stream, the failure carried by the event.
    fn wait(&self, event: &Arc<dyn Event>) -> Result<(), CommError>;

    /// When `slices` are dropped, their memory may be given back in the order of this stream. Without that it is given back
    /// in the order of the compute stream, which then waits for all other streams that use it.
    ///
    /// # Safety
    /// What is still to be done with the slices, on any stream, comes before the present end of this one.
    unsafe fn retire(&self, _slices: &[Slice]) {}

    /// Itself, if it is of a device that ranks of one process may share; `None` for streams of the CPU.
    fn on_device(&self) -> Option<&dyn DeviceStream> {
        None
    }

    /// Itself, for communicators of the same kind of device.
    fn as_any(&self) -> &dyn Any;
}

/// A stream of a device that ranks of one process may share: they carry out their collectives there themselves, by copies and
/// sums of each other's slices.
///
/// # Safety
/// [`DeviceStream::sum_ranks`] writes `out` and reads `sources`, no other memory, in the order of the stream; it refuses what
/// does not fit. Slices given to [`DeviceStream::note_use`] are not given back before the stream has passed its present end.
pub unsafe trait DeviceStream: Stream {
    /// `cuda:0`.
    fn device_name(&self) -> &str;

    /// The first failure of the device, if there is one.
    ///
    /// # Errors
    /// That failure.
    fn check_device(&self) -> Result<(), CommError>;

    /// What was submitted so far uses `slices`.
    ///
    /// # Errors
    /// As for [`Stream::submit`].
    fn note_use(&self, slices: &[Slice]) -> Result<(), CommError>;

    /// `out (+)= scale * (sources[0] + sources[1] + ..)`, summed in this order in f32, rounded once.
    ///
    /// # Errors
    /// If the slices do not fit each other, or are not of the device; as for [`Stream::submit`].
    fn sum_ranks(
        &self,
        sources: &[Slice],
        out: &Slice,
        scale: f32,
        accumulate: Accumulate,
    ) -> Result<(), CommError>;
}

/// Set by work on a stream of the CPU.
#[derive(Default)]
struct HostMark(OnceLock<u64>);

impl Mark for HostMark {
    fn time(&self) -> Option<u64> {
        self.0.get().copied()
    }
}
