//! Waits and records that are left out, as if the program had forgotten one.

use std::collections::HashMap;
use std::ffi::c_int;

use crate::clock::thread_name;
use crate::queue::{Position, StreamId};
use crate::state::State;

/// What may be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// A stream waits for an event.
    Wait = 0,
    /// A stream records an event.
    Record = 1,
}

/// What became of the step that a test wanted left out. The values are part of the interface to tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fate {
    /// It has not come.
    #[default]
    Pending = 0,
    /// It was left out.
    LeftOut = 1,
    /// It was left out, and said nothing that was not known: it was not needed.
    Redundant = 2,
}

/// Whose steps are counted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// Those of the streams of a device.
    Device(usize),
    /// Those that a thread of this name takes.
    Thread(String),
}

/// The `nth` such step, from 0.
pub struct Mutation {
    pub step: Step,
    pub owner: Owner,
    pub nth: u64,
}

#[derive(Default)]
pub struct Mutations {
    wanted: Option<Mutation>,
    pub fate: Fate,
    /// How many steps there were so far.
    seen: HashMap<(Step, Owner), u64>,
}

impl Step {
    pub fn find(step: c_int) -> Option<Self> {
        [Step::Wait, Step::Record].into_iter().find(|known| *known as c_int == step)
    }
}

impl Mutations {
    pub fn leave_out(&mut self, mutation: Mutation) {
        self.wanted = Some(mutation);
        self.fate = Fate::Pending;
    }

    pub fn seen(&self, step: Step, owner: Owner) -> u64 {
        self.seen.get(&(step, owner)).copied().unwrap_or(0)
    }

    /// Counts a step for each of its owners; whether it is the one to be left out.
    fn count(&mut self, step: Step, owners: [Owner; 2]) -> bool {
        let mut wanted = false;
        for owner in owners {
            let count = self.seen.entry((step, owner.clone())).or_default();
            wanted |=
                self.wanted.as_ref().is_some_and(|w| w.step == step && w.owner == owner && w.nth == *count);
            *count += 1;
        }
        wanted
    }
}

impl State {
    /// Whether this step of a stream is to be left out; `awaited` is what it waits for.
    pub fn leaves_out(&mut self, step: Step, stream: StreamId, awaited: Option<Position>) -> bool {
        let device = self.contexts[self.streams[stream].context].device;
        let wanted = self.mutations.count(step, [Owner::Device(device), Owner::Thread(thread_name())]);
        if wanted {
            let known =
                |position: Position| position.stream == stream || self.streams[stream].clock.knows(position);
            let redundant = step == Step::Wait && awaited.is_none_or(known);
            self.mutations.fate = if redundant { Fate::Redundant } else { Fate::LeftOut };
        }
        wanted
    }
}
