//! Which threads of a rank can still go on by themselves.
//!
//! A rank works in its own thread and in the workers of the streams that it has made. Each of them either runs, or has
//! nothing to do, or waits: for an event of a stream of the same rank, or for other ranks in a collective. A rank none of
//! whose threads runs is *at rest*: only another rank can make it go on. That is what a collective must know of the ranks
//! that it lacks, to tell a wait without end from one that is long.
//!
//! The count is never too small: whoever ends a wait, or gives an idle worker something to do, counts the other thread
//! before that thread knows. A thread that waits for anything else (a lock, a file, a channel of the user's) counts as
//! running.

use std::cell::RefCell;
use std::sync::Arc;

use crate::sync::{AtomicUsize, Ordering, thread_local};

/// The threads of one rank that run, counted.
pub(crate) struct Activity {
    running: AtomicUsize,
    /// Not 0 if threads that are not counted work for the rank too: then nothing can be known of it.
    strangers: AtomicUsize,
    /// Is called when the last one stops.
    at_rest: Box<dyn Fn() + Send + Sync>,
}

thread_local! {
    /// What the present thread is counted in.
    static CURRENT: RefCell<Option<Arc<Activity>>> = const { RefCell::new(None) };
}

impl Activity {
    /// Of a rank none of whose threads has begun; `at_rest` is called each time that the last one stops.
    pub(crate) fn new(at_rest: impl Fn() + Send + Sync + 'static) -> Arc<Activity> {
        let (running, strangers) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Arc::new(Activity { running, strangers, at_rest: Box::new(at_rest) })
    }

    /// The present thread's.
    pub(crate) fn current() -> Option<Arc<Activity>> {
        CURRENT.try_with(|current| current.borrow().clone()).unwrap_or(None)
    }

    /// From now on the present thread is one of these. It is counted by [`Activity::start`].
    pub(crate) fn enter(self: &Arc<Self>) {
        CURRENT.with(|current| *current.borrow_mut() = Some(self.clone()));
    }

    /// Whether the present thread is one of these.
    pub(crate) fn is_current(self: &Arc<Self>) -> bool {
        let own = |own: &Arc<Activity>| Arc::ptr_eq(own, self);
        CURRENT.try_with(|current| current.borrow().as_ref().is_some_and(own)).unwrap_or(false)
    }

    /// One more thread runs.
    pub(crate) fn start(&self) {
        self.running.fetch_add(1, Ordering::AcqRel);
    }

    /// One thread fewer runs.
    pub(crate) fn stop(&self) {
        if self.stop_in_silence() {
            (self.at_rest)();
        }
    }

    /// One thread fewer runs; true if it was the last one, of which nobody is told.
    pub(crate) fn stop_in_silence(&self) -> bool {
        self.running.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// A thread that is not counted works for the rank too.
    pub(crate) fn admit_stranger(&self) {
        self.strangers.store(1, Ordering::Release);
    }

    /// Whether only another rank can make one of these threads go on.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.running.load(Ordering::Acquire) == 0 && self.strangers.load(Ordering::Acquire) == 0
    }
}
