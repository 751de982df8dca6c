//! Vector clocks: what is known to be complete before a point in a stream or in a host thread.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::queue::{Position, StreamId};
use crate::state;

/// For each stream, up to which of its operations everything is known to be complete.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Clock(Vec<u64>);

impl Clock {
    /// Whether the operation at `position` is complete before the point this clock describes.
    pub fn knows(&self, position: Position) -> bool {
        self.0.get(position.stream).is_some_and(|index| *index >= position.index)
    }

    pub fn learn(&mut self, position: Position) {
        if self.0.len() <= position.stream {
            self.0.resize(position.stream + 1, 0);
        }
        let index = &mut self.0[position.stream];
        *index = (*index).max(position.index);
    }

    pub fn join(&mut self, other: &Clock) {
        for (stream, index) in other.0.iter().enumerate() {
            self.learn(Position { stream: stream as StreamId, index: *index });
        }
    }
}

/// What each host thread knows to be complete: what it synchronised with.
///
/// How threads synchronise with each other is not visible here. A thread starts with what all others knew by its
/// first call, and what it knew is everyone's once it has ended (spawn and join); what threads tell each other in
/// between is said with [`Lanes::release`] and [`Lanes::acquire`].
#[derive(Default)]
pub struct Lanes {
    clocks: HashMap<u64, Clock>,
    ended: Clock,
    tokens: HashMap<u64, Clock>,
}

impl Lanes {
    fn mine(&mut self) -> &mut Clock {
        let lane = this_thread();
        if !self.clocks.contains_key(&lane) {
            let mut all = Clock::default();
            self.clocks.values().for_each(|clock| all.join(clock));
            self.clocks.insert(lane, all);
        }
        self.clocks.get_mut(&lane).expect("it was inserted above")
    }

    /// What the calling thread knows to be complete.
    pub fn known(&mut self) -> Clock {
        let mut clock = self.mine().clone();
        clock.join(&self.ended);
        clock
    }

    /// The calling thread has waited for all that `clock` holds.
    pub fn learn(&mut self, clock: &Clock) {
        self.mine().join(clock);
    }

    /// What the calling thread knows, for [`Lanes::acquire`] by another thread that it will tell.
    pub fn release(&mut self) -> u64 {
        let known = self.known();
        let token = self.tokens.len() as u64 + 1;
        self.tokens.insert(token, known);
        token
    }

    /// The calling thread was told by the thread that made `token`.
    pub fn acquire(&mut self, token: u64) {
        if let Some(clock) = self.tokens.get(&token).cloned() {
            self.learn(&clock);
        }
    }

    fn end(&mut self, lane: u64) {
        if let Some(clock) = self.clocks.remove(&lane) {
            self.ended.join(&clock);
        }
    }
}

/// A number for the calling thread.
pub fn this_thread() -> u64 {
    struct Lane(u64);
    impl Drop for Lane {
        fn drop(&mut self) {
            state::lock().lanes.end(self.0);
        }
    }
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static LANE: OnceCell<Lane> = const { OnceCell::new() };
    }
    LANE.try_with(|lane| lane.get_or_init(|| Lane(NEXT.fetch_add(1, Ordering::Relaxed))).0).unwrap_or(0)
}

/// The name of the calling thread as the system has it: its first 15 bytes.
///
/// The standard library that this one was built with did not make the thread, and does not know it.
pub fn thread_name() -> String {
    thread_local! {
        static NAME: OnceCell<String> = const { OnceCell::new() };
    }
    let read = || std::fs::read_to_string("/proc/thread-self/comm").unwrap_or_default().trim_end().to_owned();
    NAME.try_with(|name| name.get_or_init(read).clone()).unwrap_or_default()
}
