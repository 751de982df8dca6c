//! Streams, events and flat device memory.
//!
//! A *stream* runs work in the order of submission, beside the host thread and the other streams; an *event*
//! is a point in a stream that others can wait for. The pipelines speak only these traits. On the CPU
//! ([`cpu`]) a side stream is a worker thread and the compute stream is the rank's own thread; on CUDA they
//! are streams of the driver.

mod buffer;
pub mod cpu;
mod fill;
mod widen;

use std::sync::Arc;

pub use buffer::{ALIGN, Buffer, Element, OnFree, Slice};
pub use fill::{Fill, cast, fill, scale};
pub use widen::{read_f32, update_f32};

use crate::comm::CommError;

/// A point in a stream's order.
pub trait Event: Send + Sync {
    /// Blocks the calling host thread until the stream has passed this point.
    ///
    /// # Errors
    /// The failure of the stream up to here: work that failed, a collective that was aborted.
    fn synchronize(&self) -> Result<(), CommError>;

    /// True if the point was passed (also when the stream has failed).
    fn is_complete(&self) -> bool;
}

/// Work submitted to a CPU stream.
pub type Work = Box<dyn FnOnce() -> Result<(), CommError> + Send>;

/// An in-order queue of device work.
pub trait Stream: Send + Sync {
    /// Name of the lane in traces: `compute`, `all-gather`, `reduce`.
    fn name(&self) -> &str;

    /// Runs `work` after all that was submitted before. On the compute stream of the CPU it runs at once, in
    /// the calling thread.
    ///
    /// # Errors
    /// On a stream that runs in the calling thread, those of `work`; otherwise they surface at the next
    /// event.
    fn submit(&self, work: Work) -> Result<(), CommError>;

    /// Marks the present end of the stream.
    fn record(&self) -> Arc<dyn Event>;

    /// Work submitted from now on runs after `event`. On a stream that runs in the calling thread this blocks
    /// it.
    ///
    /// # Errors
    /// On such a stream, the failure carried by the event.
    fn wait(&self, event: &Arc<dyn Event>) -> Result<(), CommError>;
}
