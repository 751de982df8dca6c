//! Streams of the CPU: in-order worker threads, and the rank's own thread as the compute stream.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::activity::Activity;
use super::{Event, Stream, Work};
use crate::error::{CommError, panic_text};
use crate::sync::mpsc::{Receiver, Sender, channel};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{AtomicUsize, Condvar, Mutex, Ordering, thread_local};

/// An event that the worker of a stream completes once.
struct CpuEvent {
    state: Mutex<EventState>,
    completed: Condvar,
    /// What the worker is counted in.
    activity: Option<Arc<Activity>>,
}

#[derive(Default)]
struct EventState {
    outcome: Option<Result<(), CommError>>,
    /// One for each thread that waits and is not counted meanwhile.
    at_rest: Vec<Arc<Activity>>,
}

impl CpuEvent {
    fn complete(&self, outcome: Result<(), CommError>) {
        let mut state = self.state.lock();
        state.outcome = Some(outcome);
        for activity in state.at_rest.drain(..) {
            activity.start();
        }
        self.completed.notify_all();
    }
}

// SAFETY: it is completed by the stream's worker, where it comes to it in its queue; the lock makes what came before seen.
// Nobody takes the outcome away.
unsafe impl Event for CpuEvent {
    fn synchronize(&self) -> Result<(), CommError> {
        let mut state = self.state.lock();
        // Only a thread of the same rank knows what the worker is up to.
        let activity = self.activity.as_ref().filter(|activity| activity.is_current());
        if let Some(activity) = activity.filter(|_| state.outcome.is_none()) {
            state.at_rest.push(activity.clone());
            drop(state);
            activity.stop();
            state = self.state.lock();
        }
        loop {
            match &state.outcome {
                Some(outcome) => return outcome.clone(),
                None => self.completed.wait(&mut state),
            }
        }
    }

    fn is_complete(&self) -> bool {
        self.state.lock().outcome.is_some()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// An event that lies in the past.
struct Passed(Result<(), CommError>);

// SAFETY: it is made by a stream whose work runs where it is submitted, after the work; or by one that never ran any.
unsafe impl Event for Passed {
    fn synchronize(&self) -> Result<(), CommError> {
        self.0.clone()
    }

    fn is_complete(&self) -> bool {
        true
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

enum Item {
    Work(Work),
    Record(Arc<CpuEvent>),
    Wait(Arc<dyn Event>),
}

/// A side stream: one worker thread that runs what is submitted, in order.
///
/// Work that fails or panics, and an event that was waited for and carries a failure, fail the stream for
/// good: later work is dropped unrun and every later event completes with that first error.
///
/// Dropping the last handle runs what is still queued and joins the worker. Inside a launched rank a worker
/// that is still busy is joined by the launcher instead, once the rank's end is known to its peers: the
/// worker may be in a collective that only that knowledge ends.
pub struct CpuStream {
    name: String,
    /// `None` if the worker thread could not be started.
    queue: Option<Sender<Item>>,
    queued: Arc<AtomicUsize>,
    /// What the worker is counted in while something is queued: that of the thread that made the stream.
    activity: Option<Arc<Activity>>,
    worker: Option<JoinHandle<()>>,
    failed_at_birth: Option<CommError>,
}

impl std::fmt::Debug for CpuStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuStream").field("name", &self.name).finish_non_exhaustive()
    }
}

impl CpuStream {
    /// Starts a stream with a worker thread of the given name, `rank0/all-gather` for instance. If the system
    /// has no thread left, the stream is one that has failed already.
    pub fn spawn(name: impl Into<String>) -> Arc<CpuStream> {
        let name = name.into();
        let (queue, items) = channel();
        let queued = Arc::new(AtomicUsize::new(0));
        let activity = Activity::current();
        let (stream, counter, own) = (name.clone(), queued.clone(), activity.clone());
        let work = move || work_off(&stream, &items, &counter, own.as_ref());
        let (queue, worker, failed_at_birth) = match thread::Builder::new().name(name.clone()).spawn(work) {
            Ok(worker) => (Some(queue), Some(worker), None),
            Err(error) => {
                let message = format!("its worker thread could not be started: {error}");
                (None, None, Some(CommError::Stream { stream: name.clone(), message }))
            }
        };
        Arc::new(CpuStream { name, queue, queued, activity, worker, failed_at_birth })
    }

    /// Whether its worker is counted in `activity`.
    pub(crate) fn is_counted_in(&self, activity: &Arc<Activity>) -> bool {
        self.activity.as_ref().is_some_and(|own| Arc::ptr_eq(own, activity))
    }

    fn push(&self, item: Item) -> Result<(), CommError> {
        if let Some(failure) = &self.failed_at_birth {
            return Err(failure.clone());
        }
        if self.queued.fetch_add(1, Ordering::AcqRel) == 0
            && let Some(activity) = &self.activity
        {
            activity.start();
        }
        match &self.queue {
            Some(queue) if queue.send(item).is_ok() => Ok(()),
            _ => Err(CommError::Stream {
                stream: self.name.clone(),
                message: "its worker thread is gone".to_owned(),
            }),
        }
    }
}

// SAFETY: one worker takes what is submitted from a queue, in order, and runs it to its end before it takes the next.
unsafe impl Stream for CpuStream {
    fn name(&self) -> &str {
        &self.name
    }

    fn submit(&self, work: Work) -> Result<(), CommError> {
        self.push(Item::Work(work))
    }

    fn record(&self) -> Arc<dyn Event> {
        let activity = self.activity.clone();
        let event = Arc::new(CpuEvent { state: Mutex::default(), completed: Condvar::default(), activity });
        match self.push(Item::Record(event.clone())) {
            Ok(()) => event,
            Err(failure) => Arc::new(Passed(Err(failure))),
        }
    }

    fn wait(&self, event: &Arc<dyn Event>) -> Result<(), CommError> {
        self.push(Item::Wait(event.clone()))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CpuStream {
    fn drop(&mut self) {
        // The worker ends when it has run what is queued.
        drop(self.queue.take());
        let Some(worker) = self.worker.take() else { return };
        if worker.thread().id() == thread::current().id() {
            // The last handle was in the stream's own work: a thread cannot join itself.
            return;
        }
        let worker = if self.queued.load(Ordering::Acquire) == 0 { Some(worker) } else { defer_join(worker) };
        if let Some(worker) = worker {
            // The worker catches the panics of its work, so that there is nothing to learn from the result.
            let _ = worker.join();
        }
    }
}

/// The worker thread's loop.
fn work_off(stream: &str, items: &Receiver<Item>, queued: &AtomicUsize, activity: Option<&Arc<Activity>>) {
    if let Some(activity) = activity {
        activity.enter();
    }
    let mut failure: Option<CommError> = None;
    for item in items {
        let outcome = match item {
            Item::Record(event) => {
                event.complete(failure.clone().map_or(Ok(()), Err));
                Ok(())
            }
            Item::Wait(event) if failure.is_none() => event.synchronize(),
            Item::Work(work) if failure.is_none() => guarded(stream, work),
            // What unrun work holds may act on being dropped: collectives tell their peers.
            Item::Work(work) => guarded(stream, move || {
                drop(work);
                Ok(())
            }),
            Item::Wait(_) => Ok(()),
        };
        if let Err(error) = outcome {
            failure.get_or_insert(error);
        }
        if queued.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(activity) = activity
        {
            activity.stop();
        }
    }
}

fn guarded(stream: &str, work: impl FnOnce() -> Result<(), CommError>) -> Result<(), CommError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| {
        let message = format!("work panicked: {}", panic_text(payload.as_ref()));
        Err(CommError::Stream { stream: stream.to_owned(), message })
    })
}

thread_local! {
    /// Workers whose join was left to the [`WorkerScope`] of this thread; `None` outside of one.
    static DEFERRED: RefCell<Option<Vec<JoinHandle<()>>>> = const { RefCell::new(None) };
}

/// Leaves `worker` to this thread's scope, or gives it back if there is none.
pub(crate) fn defer_join(worker: JoinHandle<()>) -> Option<JoinHandle<()>> {
    DEFERRED
        .try_with(|deferred| match &mut *deferred.borrow_mut() {
            Some(workers) => {
                workers.push(worker);
                None
            }
            None => Some(worker),
        })
        .unwrap_or(None)
}

/// While it lives, busy streams dropped by this thread are not joined there but in [`WorkerScope::join`].
///
/// A rank that fails drops its streams on the way out, before anyone knows of its failure. Their workers may
/// wait in collectives for peers that wait for this rank elsewhere: to join them there would be a deadlock.
pub(crate) struct WorkerScope(());

impl WorkerScope {
    /// Begins the scope of the calling thread.
    pub(crate) fn enter() -> WorkerScope {
        DEFERRED.with(|deferred| *deferred.borrow_mut() = Some(Vec::new()));
        WorkerScope(())
    }

    /// Joins the workers that were left to the scope.
    pub(crate) fn join(self) {
        let workers = DEFERRED.with(|deferred| deferred.borrow_mut().take());
        for worker in workers.into_iter().flatten() {
            let _ = worker.join();
        }
    }
}

/// The rank's own thread as a stream: work runs at once where it is submitted.
///
/// Its failures are returned at once and are for good, as on every stream; a panic of the work is the rank's
/// own and passes through.
pub struct ComputeStream {
    name: String,
    failure: Mutex<Option<CommError>>,
}

impl std::fmt::Debug for ComputeStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ComputeStream").field("name", &self.name).finish_non_exhaustive()
    }
}

impl ComputeStream {
    /// A stream of this name (`compute`).
    pub fn new(name: impl Into<String>) -> Arc<ComputeStream> {
        Arc::new(ComputeStream { name: name.into(), failure: Mutex::new(None) })
    }

    fn run(&self, work: impl FnOnce() -> Result<(), CommError>) -> Result<(), CommError> {
        self.state()?;
        work().inspect_err(|error| {
            self.failure.lock().get_or_insert_with(|| error.clone());
        })
    }

    fn state(&self) -> Result<(), CommError> {
        self.failure.lock().clone().map_or(Ok(()), Err)
    }
}

// SAFETY: work runs to its end in the call that submits it.
unsafe impl Stream for ComputeStream {
    fn name(&self) -> &str {
        &self.name
    }

    fn submit(&self, work: Work) -> Result<(), CommError> {
        self.run(work)
    }

    fn record(&self) -> Arc<dyn Event> {
        Arc::new(Passed(self.state()))
    }

    fn wait(&self, event: &Arc<dyn Event>) -> Result<(), CommError> {
        self.run(|| event.synchronize())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Work that passes when the other end of the channel says so.
    fn gate() -> (Sender<()>, Work) {
        let (open, gate) = channel();
        (open, Box::new(move || gate.recv().map_err(|_| fault("gate dropped"))))
    }

    fn fault(message: &str) -> CommError {
        CommError::Invalid { rank: 0, message: message.to_owned() }
    }

    fn push(log: &Arc<Mutex<Vec<u32>>>, value: u32) -> Work {
        let log = log.clone();
        Box::new(move || {
            log.lock().push(value);
            Ok(())
        })
    }

    #[test]
    fn work_runs_in_order_beside_the_host() {
        let log = Arc::default();
        let stream = CpuStream::spawn("rank0/test");
        let (open, gate) = gate();
        stream.submit(gate).unwrap();
        for value in 0..100 {
            stream.submit(push(&log, value)).unwrap();
        }
        let event = stream.record();
        assert!(!event.is_complete());
        assert!(log.lock().is_empty());
        open.send(()).unwrap();
        event.synchronize().unwrap();
        assert!(event.is_complete());
        assert_eq!(*log.lock(), (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn a_stream_waits_for_the_event_of_another_without_blocking_the_host() {
        let log = Arc::default();
        let (first, second) = (CpuStream::spawn("first"), CpuStream::spawn("second"));
        let (open, gate) = gate();
        first.submit(gate).unwrap();
        first.submit(push(&log, 1)).unwrap();
        second.wait(&first.record()).unwrap();
        second.submit(push(&log, 2)).unwrap();
        let event = second.record();
        assert!(!event.is_complete());
        open.send(()).unwrap();
        event.synchronize().unwrap();
        assert_eq!(*log.lock(), [1, 2]);
    }

    #[test]
    fn failed_work_fails_every_later_event_and_skips_later_work() {
        let log = Arc::default();
        let stream = CpuStream::spawn("rank0/reduce");
        let before = stream.record();
        stream.submit(Box::new(|| Err(fault("no")))).unwrap();
        stream.submit(push(&log, 1)).unwrap();
        stream.submit(Box::new(|| Err(fault("later")))).unwrap();
        before.synchronize().unwrap();
        assert_eq!(stream.record().synchronize(), Err(fault("no")));
        assert_eq!(stream.record().synchronize(), Err(fault("no")));
        assert!(log.lock().is_empty());
    }

    #[test]
    fn a_panic_on_a_stream_is_its_error_and_keeps_the_text() {
        let stream = CpuStream::spawn("rank1/all-gather");
        stream.submit(Box::new(|| panic!("boom {}", 7))).unwrap();
        let error = stream.record().synchronize().unwrap_err();
        assert_eq!(error.to_string(), "stream `rank1/all-gather`: work panicked: boom 7");
    }

    #[test]
    fn a_failure_passes_on_to_streams_that_wait_for_it() {
        let (first, second) = (CpuStream::spawn("first"), CpuStream::spawn("second"));
        first.submit(Box::new(|| Err(fault("no")))).unwrap();
        second.wait(&first.record()).unwrap();
        let log = Arc::default();
        second.submit(push(&log, 1)).unwrap();
        assert_eq!(second.record().synchronize(), Err(fault("no")));
        assert!(log.lock().is_empty());
    }

    #[test]
    fn dropping_a_stream_runs_what_is_queued() {
        let log = Arc::default();
        let stream = CpuStream::spawn("rank0/test");
        for value in 0..50 {
            stream.submit(push(&log, value)).unwrap();
        }
        let event = stream.record();
        drop(stream);
        assert_eq!(log.lock().len(), 50);
        assert!(event.is_complete());
    }

    #[test]
    fn the_last_handle_may_go_in_the_streams_own_work() {
        let stream = CpuStream::spawn("rank0/test");
        let (open, gate) = gate();
        stream.submit(gate).unwrap();
        let own = stream.clone();
        stream
            .submit(Box::new(move || {
                drop(own);
                Ok(())
            }))
            .unwrap();
        let event = stream.record();
        drop(stream);
        open.send(()).unwrap();
        event.synchronize().unwrap();
    }

    #[test]
    fn busy_workers_are_joined_at_the_end_of_the_scope() {
        let log = Arc::default();
        let scope = WorkerScope::enter();
        let stream = CpuStream::spawn("rank0/test");
        let (open, gate) = gate();
        stream.submit(gate).unwrap();
        stream.submit(push(&log, 1)).unwrap();
        drop(stream);
        open.send(()).unwrap();
        scope.join();
        assert_eq!(*log.lock(), [1]);
    }

    #[test]
    fn the_compute_stream_runs_at_once_and_stays_failed() {
        let stream = ComputeStream::new("compute");
        let log = Arc::default();
        stream.submit(push(&log, 1)).unwrap();
        assert_eq!(*log.lock(), [1]);
        let before = stream.record();
        assert!(before.is_complete());
        let side = CpuStream::spawn("side");
        side.submit(Box::new(|| Err(fault("no")))).unwrap();
        assert_eq!(stream.wait(&side.record()), Err(fault("no")));
        assert_eq!(stream.submit(push(&log, 2)), Err(fault("no")));
        assert_eq!(stream.record().synchronize(), Err(fault("no")));
        assert_eq!(before.synchronize(), Ok(()));
        assert_eq!(*log.lock(), [1]);
    }
}
