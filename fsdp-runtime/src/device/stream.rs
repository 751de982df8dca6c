//! The traits of streams and events.

use std::sync::Arc;

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
