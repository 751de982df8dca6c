//! The watchdog: one thread for the communicators of a rank, which sees to it that nobody waits for ever.
//!
//! It asks NCCL for errors and the device for how far it is, and the ledger for what other ranks say. On the first
//! failure of any of them all communicators of the rank are aborted, so that what they have on the device ends, and the
//! device fails with the error, which ends the host's waits for it. It also ends communicators that are no more used:
//! what was enqueued is done before, and no rank waits there for another.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::flight::Comm;
use super::handle::Health;
use crate::comm::CommError;
use crate::comm::ledger::{Ledger, Trouble};
use crate::device::cpu::defer_join;
use crate::device::cuda::CudaDevice;
use crate::sync::thread::{Builder, JoinHandle};

/// The communicators of a rank on a device: those that were made of one.
pub(super) struct Family {
    pub(super) device: CudaDevice,
    /// Of all ranks that were made known to each other.
    ledger: Arc<dyn Ledger>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Communicators that the watchdog has not seen yet.
    new: Vec<Arc<Comm>>,
    /// There will be no more.
    closed: bool,
    /// What there is must not be waited for.
    abandoned: bool,
}

/// What keeps a family's watchdog. It is dropped with the last communicator of the family, which ends the thread.
pub(super) struct Lease {
    pub(super) family: Arc<Family>,
    watchdog: Option<JoinHandle<()>>,
}

/// Between looks.
const TICK: Duration = Duration::from_millis(20);
/// The device is asked about collectives that are older.
const YOUNG: Duration = Duration::from_millis(500);

impl Lease {
    /// Starts the watchdog.
    pub(super) fn new(device: CudaDevice, ledger: Arc<dyn Ledger>) -> Result<Arc<Lease>, CommError> {
        let rank = ledger.caller().rank;
        let family = Arc::new(Family { device, ledger, state: Mutex::default(), changed: Condvar::new() });
        let watched = family.clone();
        let name = format!("rank{rank}/nccl-watchdog");
        let watchdog = Builder::new().name(name.clone()).spawn(move || watched.watch());
        let watchdog = watchdog.map_err(|error| {
            let message = format!("the thread could not be started: {error}");
            CommError::Stream { stream: name, message }
        })?;
        Ok(Arc::new(Lease { family, watchdog: Some(watchdog) }))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.family.state.lock();
        state.closed = true;
        state.abandoned = std::thread::panicking();
        drop(state);
        self.family.changed.notify_all();
        // A rank that fails comes here before anyone knows of it: its launcher joins, once it has told the others.
        if let Some(watchdog) = self.watchdog.take().and_then(defer_join) {
            let _ = watchdog.join();
        }
    }
}

impl Family {
    pub(super) fn add(&self, comm: Arc<Comm>) {
        self.state.lock().new.push(comm);
    }

    pub(super) fn release(&self, comm: &Comm) {
        comm.release();
        self.changed.notify_all();
    }

    fn watch(&self) {
        if let Err(error) = self.device.bind().and_then(|()| self.device.tolerate_captures()) {
            self.device.fail(error);
        }
        let mut watched = Vec::new();
        loop {
            let (closed, abandoned) = {
                let mut state = self.state.lock();
                watched.extend(state.new.drain(..).map(Watched::new));
                (state.closed, state.abandoned)
            };
            if let Some(error) = self.failure(abandoned) {
                self.device.fail(error);
                abort_all(&mut watched);
            } else {
                watched.retain_mut(|watched| {
                    let ended = watched.look(closed);
                    // What it is will be seen in the next round.
                    !ended.unwrap_or_else(|trouble| {
                        let number = watched.comm.oldest().map(|(_, number)| number);
                        watched.comm.ledger.give_up(number, trouble);
                        false
                    })
                });
                give_up_late(&watched);
            }
            let mut state = self.state.lock();
            if state.closed && state.new.is_empty() && watched.is_empty() {
                return;
            }
            self.changed.wait_for(&mut state, TICK);
        }
    }

    /// The failure of the world, or else of the device, of which the world is told.
    fn failure(&self, abandoned: bool) -> Option<CommError> {
        if let Some(error) = self.ledger.failure() {
            return Some(error);
        }
        if let Err(error) = self.device.check() {
            return Some(self.ledger.give_up(None, Trouble::Here(error.to_string())));
        }
        abandoned.then(|| {
            let message = "its collectives were given up as the rank panicked".to_owned();
            CommError::Stream { stream: self.device.name().to_owned(), message }
        })
    }
}

/// Aborts all communicators at once, and forgets those that have ended. One that a graph holds ends with the graph, whose
/// work on another may have to be aborted for that.
fn abort_all(watched: &mut Vec<Watched>) {
    let ended: Vec<bool> = std::thread::scope(|scope| {
        let calls: Vec<_> = watched.iter().map(|watched| scope.spawn(|| watched.comm.abort())).collect();
        calls.into_iter().map(|call| call.join().unwrap_or(false)).collect()
    });
    let mut ended = ended.into_iter();
    watched.retain(|_| !ended.next().unwrap_or(false));
}

/// Fails the world if a collective does not end in time. The one that is named was enqueued first of those that have not
/// ended, on whatever communicator: what comes later may wait for it.
fn give_up_late(watched: &[Watched]) {
    if !watched.iter().any(|watched| watched.comm.is_late()) {
        return;
    }
    let oldest = watched.iter().filter_map(|watched| Some((watched.comm.oldest()?, watched)));
    if let Some(((_, number), watched)) = oldest.min_by_key(|((called, _), _)| *called) {
        watched.comm.ledger.give_up(Some(number), Trouble::Late);
    }
}

/// A communicator as the watchdog sees it.
struct Watched {
    comm: Arc<Comm>,
    /// Since when NCCL has said that another rank has failed.
    suspicious: Option<Instant>,
    /// Since when all is done that will ever be enqueued.
    idle: Option<Instant>,
    finalized: bool,
}

impl Watched {
    fn new(comm: Arc<Comm>) -> Watched {
        Watched { comm, suspicious: None, idle: None, finalized: false }
    }

    /// Looks for what is wrong, and goes on with its end if it is no more used; true once it has ended.
    fn look(&mut self, closed: bool) -> Result<bool, Trouble> {
        let health = self.comm.handle.health();
        self.follow(closed).map_err(|error| Trouble::Here(error.to_string()))?;
        let idle = self.comm.has_landed();
        if idle && self.comm.is_released() {
            return Ok(self.end(&health));
        }
        match health {
            // A rank that has ended well may look like one that is lost: it matters to who waits for it.
            Health::Failed(failure) if failure.is_remote() && idle => self.suspicious = None,
            Health::Failed(failure) => {
                let since = *self.suspicious.get_or_insert_with(Instant::now);
                if !failure.is_remote() || since.elapsed() > self.comm.news() {
                    return Err(failure.trouble());
                }
            }
            Health::Ready | Health::Busy | Health::Gone => {}
        }
        Ok(false)
    }

    /// Ends it, step by step; true at the last one. The other ranks have this one's part of all collectives: where it
    /// takes too long, or fails, it goes without them.
    fn end(&mut self, health: &Health) -> bool {
        let since = *self.idle.get_or_insert_with(Instant::now);
        let Watched { comm, finalized, .. } = self;
        let late = since.elapsed() > comm.ledger.timeout();
        let went_well = match health {
            Health::Gone => return true,
            Health::Failed(_) => false,
            Health::Busy | Health::Ready if late => false,
            Health::Busy => true,
            Health::Ready if *finalized => comm.handle.destroy().is_ok(),
            Health::Ready => match comm.deregister() {
                Ok(true) => {
                    *finalized = true;
                    comm.handle.finalize().is_ok()
                }
                Ok(false) => true,
                Err(_) => false,
            },
        };
        (!went_well && comm.abort()) || matches!(comm.handle.health(), Health::Gone)
    }

    /// Follows the collectives: young ones only if they are waited for.
    fn follow(&self, closed: bool) -> Result<(), CommError> {
        const PAUSE: Duration = Duration::from_micros(100);
        let comm = &self.comm;
        if !closed && !comm.is_released() {
            return comm.follow(YOUNG.min(comm.ledger.timeout() / 4));
        }
        let start = Instant::now();
        loop {
            comm.follow(Duration::ZERO)?;
            if comm.has_landed() || start.elapsed() > TICK || comm.check().is_err() {
                return Ok(());
            }
            std::thread::sleep(PAUSE);
        }
    }
}
