//! Waits and records that are left out, as if the program had forgotten one.

use std::ffi::c_int;

use crate::queue::{Position, StreamId};
use crate::state::State;

/// What may be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// The `nth` such step, from 0, of the streams of a device.
#[derive(Clone, Copy)]
pub struct Mutation {
    pub step: Step,
    pub device: usize,
    pub nth: u64,
}

#[derive(Default)]
pub struct Mutations {
    wanted: Option<Mutation>,
    pub fate: Fate,
    /// How many steps there were so far.
    seen: Vec<(Step, usize, u64)>,
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

    pub fn seen(&self, step: Step, device: usize) -> u64 {
        self.seen.iter().find(|(s, d, _)| (*s, *d) == (step, device)).map_or(0, |(_, _, count)| *count)
    }

    /// Counts a step; whether it is the one to be left out.
    fn count(&mut self, step: Step, device: usize) -> bool {
        let number = self.seen(step, device);
        self.seen.retain(|(s, d, _)| (*s, *d) != (step, device));
        self.seen.push((step, device, number + 1));
        self.wanted.is_some_and(|wanted| (wanted.step, wanted.device, wanted.nth) == (step, device, number))
    }
}

impl State {
    /// Whether this step of a stream is to be left out; `awaited` is what it waits for.
    pub fn leaves_out(&mut self, step: Step, stream: StreamId, awaited: Option<Position>) -> bool {
        let device = self.contexts[self.streams[stream].context].device;
        let wanted = self.mutations.count(step, device);
        if wanted {
            let known =
                |position: Position| position.stream == stream || self.streams[stream].clock.knows(position);
            let redundant = step == Step::Wait && awaited.is_none_or(known);
            self.mutations.fate = if redundant { Fate::Redundant } else { Fate::LeftOut };
        }
        wanted
    }
}
