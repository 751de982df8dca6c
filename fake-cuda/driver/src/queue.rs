//! Streams as queues of deferred operations.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::abi::{Outcome, Status};
use crate::capture::Act;
use crate::clock::{Clock, this_thread};
use crate::race::{self, Access, Mode};
use crate::state::State;

/// A stream's place in the state; never used twice.
pub type StreamId = usize;

/// The `index`th operation of a stream, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Position {
    pub stream: StreamId,
    pub index: u64,
}

/// What an operation does when its turn comes.
#[derive(Clone)]
pub enum Work {
    Nothing,
    /// Reads and writes the memory it has named.
    Memory(Arc<dyn Fn() + Send + Sync>),
    /// A function of the caller's, run without the lock, and since when it is queued.
    Host(Arc<dyn Fn() + Send + Sync>, Instant),
    /// Frees the block that starts there.
    Free(usize),
    /// Memory of a graph is fresh from here on.
    Refresh(usize),
    /// Memory of a graph is not to be used from here on.
    Lapse(usize),
    /// Passes when that operation is complete.
    Wait(Position),
    /// Takes the time for an event.
    Record(usize),
    /// This rank's part of NCCL calls.
    Launch(usize),
}

impl Work {
    /// The same work, queued now.
    pub fn again(self) -> Self {
        match self {
            Work::Host(run, _) => Work::Host(run, Instant::now()),
            work => work,
        }
    }
}

pub struct Operation {
    pub name: Arc<str>,
    pub work: Work,
    /// What it reads and writes, checked again before it runs.
    pub ranges: Vec<Range<usize>>,
    /// Operations submitted later that race with it: run before it, they show what the race can do.
    pub rather_after: Vec<Position>,
}

pub struct Stream {
    pub context: usize,
    /// Ordered with the legacy stream of its context.
    pub blocking: bool,
    pub legacy: bool,
    /// Made with its context or by first use, not by the caller.
    pub is_default: bool,
    pub priority: i32,
    pub name: String,
    /// Its handle is no longer valid.
    pub destroyed: bool,
    pub queue: VecDeque<Operation>,
    pub submitted: u64,
    pub done: u64,
    /// A thread is running its first operation without the lock.
    pub running: bool,
    /// How readily it runs ahead in the random mode, of 255.
    pub eagerness: u8,
    pub clock: Clock,
    /// The capture that it records for.
    pub capture: Option<usize>,
}

impl Stream {
    /// The operation at `index`, if it has not begun.
    fn pending(&mut self, index: u64) -> Option<&mut Operation> {
        let first = self.done + 1 + u64::from(self.running);
        self.queue.get_mut(index.checked_sub(first)? as usize)
    }
}

impl State {
    pub fn end_of(&self, stream: StreamId) -> Position {
        Position { stream, index: self.streams[stream].submitted }
    }

    pub fn is_done(&self, position: Position) -> bool {
        self.streams[position.stream].done >= position.index
    }

    /// Checks an operation and puts it at the end of a stream, or into the graph that this captures.
    pub fn submit(
        &mut self,
        stream: StreamId,
        call: &str,
        accesses: &[Access],
        work: Work,
    ) -> Outcome<Position> {
        let name = self.name_operation(call, stream);
        if !race::check_bounds(&mut self.heap, &mut self.reports, &name, accesses) {
            return Err(Status::INVALID_VALUE);
        }
        if self.record(stream, call, accesses, Act::Queue(work.clone()))? {
            return Ok(self.end_of(stream));
        }
        self.refuse_implicit_wait(stream)?;
        self.order_with_legacy(stream);
        let known = self.lanes.known();
        let position = self.push(stream, name.clone(), work, accesses);
        let clock = &mut self.streams[stream].clock;
        clock.join(&known);
        let racing = race::enter(&mut self.heap, &mut self.reports, &name, position, clock, accesses);
        let after = clock.clone();
        clock.learn(position);
        for access in accesses.iter().filter(|access| access.mode != Mode::Read) {
            self.uploads.forget(&access.range);
        }
        if let Some(log) = &mut self.log {
            let label = self.labels.get(&this_thread()).map_or("", String::as_str);
            log.add(call, label, position, after);
        }
        for earlier in racing {
            if let Some(operation) = self.streams[earlier.stream].pending(earlier.index) {
                operation.rather_after.push(position);
            }
        }
        Ok(position)
    }

    /// Makes what comes next on `stream` wait for `position`, and for all that is ordered before it.
    pub fn wait_for(&mut self, stream: StreamId, position: Position, clock: &Clock) {
        self.streams[stream].clock.join(clock);
        if position.stream != stream && !self.is_done(position) {
            let name = self.name_operation("a wait", stream);
            let at = self.push(stream, name, Work::Wait(position), &[]);
            self.streams[stream].clock.learn(at);
        }
    }

    fn push(&mut self, stream: StreamId, name: Arc<str>, work: Work, accesses: &[Access]) -> Position {
        let ranges = accesses.iter().map(|access| access.range.clone()).collect();
        let queue = &mut self.streams[stream];
        queue.queue.push_back(Operation { name, work, ranges, rather_after: Vec::new() });
        queue.submitted += 1;
        Position { stream, index: queue.submitted }
    }

    /// The legacy stream and the blocking streams of a context wait for each other.
    fn order_with_legacy(&mut self, stream: StreamId) {
        let this = &self.streams[stream];
        if !this.blocking {
            return;
        }
        let (context, legacy) = (this.context, this.legacy);
        for other in 0..self.streams.len() {
            let candidate = &self.streams[other];
            if other != stream
                && candidate.context == context
                && candidate.blocking
                && candidate.legacy != legacy
            {
                let clock = candidate.clock.clone();
                self.wait_for(stream, self.end_of(other), &clock);
            }
        }
    }
}
