//! Collectives in flight, and the progress of the device on them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::handle::{Handle, Health};
use super::library::Failure;
use super::memory::Registered;
use crate::comm::arguments::same_place;
use crate::comm::ledger::{Ledger, Stage, Trouble};
use crate::comm::{CommError, Registration};
use crate::device::cuda::{CudaDevice, CudaEvent};
use crate::device::{Event, Slice};

/// A communicator of NCCL, and what is under way on it.
pub(super) struct Comm {
    pub(super) handle: Handle,
    pub(super) ledger: Arc<dyn Ledger>,
    device: CudaDevice,
    flights: Mutex<VecDeque<Flight>>,
    registered: Mutex<Vec<Registered>>,
    /// Nobody will enqueue any more.
    released: AtomicBool,
}

/// A collective that was enqueued.
struct Flight {
    number: u64,
    /// When it was enqueued.
    called: Instant,
    /// When it came to be the oldest one.
    since: Instant,
    /// Where the stream comes to it; `None` once it has.
    start: Option<Arc<dyn Event>>,
    end: Arc<dyn Event>,
}

impl Comm {
    pub(super) fn new(handle: Handle, ledger: Arc<dyn Ledger>, device: CudaDevice) -> Arc<Comm> {
        Arc::new(Comm {
            handle,
            ledger,
            device,
            flights: Mutex::default(),
            registered: Mutex::default(),
            released: AtomicBool::new(false),
        })
    }

    pub(super) fn release(&self) {
        self.released.store(true, Ordering::Release);
    }

    pub(super) fn is_released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }

    /// Waits on the host until NCCL has done with its last call, during the collective `number` if that is one.
    pub(super) fn settle(&self, number: Option<u64>) -> Result<(), CommError> {
        const SPINS: u32 = 100;
        const PAUSE: Duration = Duration::from_micros(50);
        let start = Instant::now();
        let mut polls = 0;
        loop {
            let trouble = match self.handle.health() {
                Health::Ready => return Ok(()),
                Health::Busy if start.elapsed() > self.ledger.timeout() => Trouble::Late,
                Health::Failed(failure) if !failure.is_remote() || start.elapsed() > self.news() => {
                    failure.trouble()
                }
                Health::Busy | Health::Failed(_) => {
                    self.check()?;
                    polls += 1;
                    if polls < SPINS {
                        std::thread::yield_now()
                    } else {
                        std::thread::sleep(PAUSE)
                    }
                    continue;
                }
                Health::Gone => {
                    self.check()?;
                    Trouble::Here("its communicator was aborted".to_owned())
                }
            };
            return Err(self.ledger.give_up(number, trouble));
        }
    }

    /// How long a failure that NCCL lays on another rank may take to be told by that rank, which knows more.
    pub(super) fn news(&self) -> Duration {
        const NEWS: Duration = Duration::from_secs(2);
        NEWS.min(self.ledger.timeout())
    }

    /// The failure of the world or of the device.
    pub(super) fn check(&self) -> Result<(), CommError> {
        self.ledger.failure().map_or(Ok(()), Err)?;
        self.device.check()
    }

    /// The collective `number` was enqueued between these events.
    pub(super) fn took_off(&self, number: u64, start: Arc<dyn Event>, end: Arc<dyn Event>) {
        let now = Instant::now();
        self.flights.lock().push_back(Flight { number, called: now, since: now, start: Some(start), end });
    }

    /// The oldest collective that is not known to be done, and when it was enqueued.
    pub(super) fn oldest(&self) -> Option<(Instant, u64)> {
        self.flights.lock().front().map(|flight| (flight.called, flight.number))
    }

    /// Whether the oldest collective does not end in time.
    pub(super) fn is_late(&self) -> bool {
        self.flights.lock().front().is_some_and(|flight| flight.since.elapsed() > self.ledger.timeout())
    }

    pub(super) fn has_landed(&self) -> bool {
        self.flights.lock().is_empty()
    }

    /// Asks the device about collectives older than `age`. Those that are done are forgotten.
    pub(super) fn follow(&self, age: Duration) -> Result<(), CommError> {
        let mut flights = self.flights.lock();
        while let Some(flight) = flights.front_mut().filter(|flight| flight.called.elapsed() >= age) {
            if flight.start.as_ref().map_or(Ok(false), passed)? {
                self.ledger.reached(flight.number, Stage::Started);
                flight.start = None;
            }
            if flight.start.is_some() || !passed(&flight.end)? {
                break;
            }
            self.ledger.reached(flight.number, Stage::Done);
            flights.pop_front();
            if let Some(next) = flights.front_mut() {
                next.since = Instant::now();
            }
        }
        Ok(())
    }

    /// Registers a slice, unless it has been.
    pub(super) fn register(&self, slice: &Slice, how: Registration) -> Result<(), CommError> {
        let mut registered = self.registered.lock();
        if registered.iter().any(|known| same_place(known.slice(), slice)) {
            return Ok(());
        }
        // SAFETY: the communicator is alive under its lock, and its calls are waited for. The slice is memory of NCCL's, by
        // the caller's check. What is registered is kept until the communicator is at its end, or has been aborted.
        match self.handle.with(|comm| unsafe { Registered::new(comm, slice, how) }) {
            Some(Ok(new)) => registered.push(new),
            Some(Err(failure)) => return Err(self.ledger.give_up(None, failure.trouble())),
            None => {}
        }
        drop(registered);
        self.settle(None)
    }

    /// Gives up what is registered; false if that is under way.
    pub(super) fn deregister(&self) -> Result<bool, Failure> {
        let Some(last) = self.registered.lock().pop() else { return Ok(true) };
        // SAFETY: the communicator is alive under its lock, and all that was enqueued on it is done.
        let ended = self.handle.with(|comm| unsafe { last.end(comm) });
        ended.unwrap_or(Ok(())).map(|()| false)
    }

    /// Ends it at once; false if that must be tried again.
    pub(super) fn abort(&self) -> bool {
        self.flights.lock().clear();
        let ended = self.handle.abort();
        if ended {
            self.registered.lock().clear();
        }
        ended
    }
}

fn passed(event: &Arc<dyn Event>) -> Result<bool, CommError> {
    match event.as_any().downcast_ref::<CudaEvent>() {
        Some(event) => event.passed(),
        // Of a stream that has failed.
        None => event.synchronize().map(|()| true),
    }
}
