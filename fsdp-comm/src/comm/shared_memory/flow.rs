//! A collective on its way: the ranks meet, and then go through its rounds.
//!
//! A rank that waits sleeps; it looks every [`TICK`] whether the run has failed. A rank that has waited for long says on record
//! that it has come to the collective, so that those who have not are known when time runs out.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::plan::Item;
use super::segment::wait;
use super::window::{Lanes, Print, SLOTS, Window, set};
use crate::comm::CommError;
use crate::comm::ledger::{Ledger, Stage, Trouble};

/// Between looks at what is known of the run.
const TICK: Duration = Duration::from_millis(20);
/// After how long a rank says that it waits.
const LONG: Duration = Duration::from_secs(1);
/// How long the record has to find out how calls differ that do differ.
const VERDICT: Duration = Duration::from_secs(5);
/// Rounds that a rank writes ahead of those that it reads: it waits for its peers less.
const AHEAD: usize = 2;

/// The windows of a communicator's ranks, by their indices.
pub(super) struct Windows {
    pub(super) all: Vec<Window>,
    pub(super) index: usize,
    /// Rounds so far, the same on all ranks between collectives.
    pub(super) rounds: Mutex<u32>,
}

/// The collectives of a rank on a communicator, one after the other, whatever streams they run on.
#[derive(Default)]
pub(super) struct Order {
    done: Mutex<u32>,
    changed: Condvar,
}

impl Order {
    pub(super) fn done(&self, number: u32) {
        *self.done.lock() = number;
        self.changed.notify_all();
    }
}

/// How long a rank waits in a collective.
pub(super) struct Patience<'a> {
    ledger: &'a Arc<dyn Ledger>,
    /// The collective's number on record.
    entry: u64,
    said: Cell<bool>,
    start: Instant,
}

impl<'a> Patience<'a> {
    pub(super) fn new(ledger: &'a Arc<dyn Ledger>, entry: u64) -> Patience<'a> {
        Patience { ledger, entry, said: Cell::new(false), start: Instant::now() }
    }

    /// Waits until this rank is done with its collectives before `number`.
    pub(super) fn take_turn(&self, order: &Order, number: u32) -> Result<(), CommError> {
        let mut done = order.done.lock();
        while *done != number.wrapping_sub(1) {
            order.changed.wait_for(&mut done, TICK);
            self.last(self.start)?;
        }
        Ok(())
    }

    /// Whether to wait on, having waited from `start`.
    fn last(&self, start: Instant) -> Result<(), CommError> {
        if let Some(failure) = self.ledger.failure() {
            return Err(failure);
        }
        let (waited, timeout) = (start.elapsed(), self.ledger.timeout());
        if waited > LONG.min(timeout / 2) && !self.said.replace(true) {
            self.ledger.reached(self.entry, Stage::Started);
        }
        if waited > timeout {
            return Err(self.ledger.give_up(Some(self.entry), Trouble::Late));
        }
        Ok(())
    }
}

/// One collective of this rank.
pub(super) struct Flow<'a> {
    windows: &'a Windows,
    patience: Patience<'a>,
}

impl<'a> Flow<'a> {
    pub(super) fn new(windows: &'a Windows, patience: Patience<'a>) -> Flow<'a> {
        Flow { windows, patience }
    }

    pub(super) fn index(&self) -> usize {
        self.windows.index
    }

    pub(super) fn size(&self) -> usize {
        self.windows.all.len()
    }

    /// This rank, and then the others in turn from it on, so that not all read the same memory at once.
    pub(super) fn ranks(&self) -> impl Iterator<Item = usize> + use<> {
        let (index, size) = (self.index(), self.size());
        (index..size).chain(0..index)
    }

    fn own(&self) -> &'a Window {
        &self.windows.all[self.windows.index]
    }

    /// Comes to the collective of this number, waits for the others, and compares what they do.
    pub(super) fn meet(&self, number: u32, print: Print) -> Result<(), CommError> {
        self.own().arrive(number, print);
        for peer in self.ranks().skip(1) {
            let window = &self.windows.all[peer];
            self.until(window.arrived(), number)?;
            if window.print(number) != print {
                return Err(self.differs(peer));
            }
        }
        Ok(())
    }

    /// The calls differ: the record, which has both, says how.
    fn differs(&self, peer: usize) -> CommError {
        let start = Instant::now();
        while start.elapsed() < VERDICT {
            if let Some(failure) = self.patience.ledger.failure() {
                return failure;
            }
            std::thread::sleep(TICK / 4);
        }
        let peer = self.patience.ledger.world_rank(peer);
        let how =
            format!("rank {peer} calls another collective than rank {}", self.patience.ledger.caller().rank);
        self.patience.ledger.give_up(Some(self.patience.entry), Trouble::Elsewhere(how))
    }

    /// Goes through the rounds: `put` writes an item of this rank into the lanes; `take` reads a round from the slots of the
    /// ranks that it asks for, and waits there for them.
    pub(super) fn exchange(
        &self,
        lanes: usize,
        rounds: &[Vec<Item>],
        put: impl Fn(&Item, &Lanes<'_>),
        take: impl Fn(&[Item], &dyn Fn(usize) -> Result<Lanes<'a>, CommError>) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let (own, mut first) = (self.own(), self.windows.rounds.lock());
        let number = |round: usize| first.wrapping_add(round as u32);
        let mut written = 0;
        for (round, items) in rounds.iter().enumerate() {
            while written < rounds.len().min(round + AHEAD) {
                let free = number(written).wrapping_add(1).wrapping_sub(SLOTS);
                for peer in self.ranks().skip(1) {
                    self.until(self.windows.all[peer].read(), free)?;
                }
                let lanes = own.lanes(number(written), lanes);
                rounds[written].iter().for_each(|item| put(item, &lanes));
                written += 1;
                set(own.written(), number(written));
            }
            take(items, &|peer| {
                let window = &self.windows.all[peer];
                if peer != self.index() {
                    self.until(window.written(), number(round + 1))?;
                }
                Ok(window.lanes(number(round), lanes))
            })?;
            set(own.read(), number(round + 1));
        }
        let next = number(rounds.len());
        *first = next;
        Ok(())
    }

    /// Waits until a peer's word has come to `target`.
    fn until(&self, word: &AtomicU32, target: u32) -> Result<(), CommError> {
        let start = Instant::now();
        loop {
            let seen = word.load(Ordering::Acquire);
            if seen.wrapping_sub(target).cast_signed() >= 0 {
                return Ok(());
            }
            wait(word, seen, TICK);
            self.patience.last(start)?;
        }
    }
}
