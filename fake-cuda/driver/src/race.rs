//! Finds operations that touch the same bytes without one being ordered before the other.
//!
//! Every operation is checked when it is submitted, against those that touched the block before it: the order of
//! submission is one order that all waits allow, and an operation that comes later in it can only be ordered after,
//! or not ordered. So what is found does not depend on how the queues happened to run.

use std::ops::Range;
use std::sync::Arc;

use crate::clock::Clock;
use crate::heap::Heap;
use crate::queue::Position;
use crate::report::{Kind, Reports};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Read,
    Write,
    Allocate,
    Free,
}

/// Bytes that an operation reads or writes.
#[derive(Clone, Debug)]
pub struct Access {
    pub range: Range<usize>,
    pub mode: Mode,
}

impl Access {
    pub fn read(start: usize, bytes: usize) -> Self {
        Access { range: start..start + bytes, mode: Mode::Read }
    }

    pub fn write(start: usize, bytes: usize) -> Self {
        Access { range: start..start + bytes, mode: Mode::Write }
    }
}

impl Access {
    /// Whether the two share bytes, and not only to read them.
    pub fn conflicts(&self, other: &Access) -> bool {
        let overlap = self.range.start < other.range.end && other.range.start < self.range.end;
        overlap && !(self.mode == Mode::Read && other.mode == Mode::Read)
    }
}

/// A past access to a block.
pub struct Touch {
    access: Access,
    at: Position,
    name: Arc<str>,
}

impl Touch {
    fn conflicts(&self, access: &Access) -> bool {
        let overlap =
            self.access.range.start < access.range.end && access.range.start < self.access.range.end;
        overlap && !(self.access.mode == Mode::Read && access.mode == Mode::Read)
    }

    /// Whether nothing that a later operation could conflict with is lost by forgetting this touch for `access`,
    /// which is ordered after it: what is not ordered after the older one is not ordered after the newer one either.
    fn is_superseded_by(&self, access: &Access) -> bool {
        let covered =
            access.range.start <= self.access.range.start && self.access.range.end <= access.range.end;
        match (self.access.mode, access.mode) {
            (Mode::Free, _) | (_, Mode::Free) => false,
            (Mode::Read, Mode::Read) | (_, Mode::Write) => covered,
            _ => false,
        }
    }
}

/// Whether all accesses of an operation are to memory; reports those that are not.
pub fn check_bounds(heap: &mut Heap, reports: &mut Reports, name: &str, accesses: &[Access]) -> bool {
    let mut sound = true;
    for access in accesses.iter().filter(|access| !access.range.is_empty()) {
        let (start, bytes) = (access.range.start, access.range.len());
        match heap.holding(start) {
            Some(block) if access.range.end <= block.range().end => continue,
            Some(block) => reports.add(
                Kind::InvalidAccess,
                format!(
                    "{name} touches {bytes} bytes at offset {} of {}",
                    start - block.start(),
                    block.describe()
                ),
            ),
            None => {
                reports.add(
                    Kind::InvalidAccess,
                    format!("{name} touches {bytes} bytes at {start:#x}, no memory"),
                );
            }
        }
        sound = false;
    }
    sound
}

/// Checks the accesses of the operation at `at`, ordered after what `clock` holds, and remembers them; returns the
/// operations that it races with, those that free left out.
pub fn enter(
    heap: &mut Heap,
    reports: &mut Reports,
    name: &Arc<str>,
    at: Position,
    clock: &Clock,
    accesses: &[Access],
) -> Vec<Position> {
    let mut racing = Vec::new();
    for access in accesses.iter().filter(|access| !access.range.is_empty()) {
        let Some(block) = heap.holding(access.range.start) else { continue };
        let owner = block.describe();
        if let Some(free) = &block.freed
            && !block.touches.iter().any(|touch| touch.access.mode == Mode::Free)
            && access.mode != Mode::Free
        {
            reports.add(Kind::UseAfterFree, format!("{name} touches {owner}, which {free} has freed"));
        }
        for touch in block.touches.iter().filter(|touch| touch.at != at && touch.conflicts(access)) {
            let ordered = clock.knows(touch.at);
            let earlier = &touch.name;
            if !ordered && matches!(touch.access.mode, Mode::Read | Mode::Write) {
                racing.push(touch.at);
            }
            match (touch.access.mode, access.mode, ordered) {
                (_, Mode::Allocate, true) => {}
                (Mode::Free, _, true) => {
                    reports.add(
                        Kind::UseAfterFree,
                        format!("{name} touches {owner}, which {earlier} has freed"),
                    );
                }
                (Mode::Free, _, false) => reports.add(
                    Kind::UseAfterFree,
                    format!("{name} is not ordered before {earlier}, which frees {owner}"),
                ),
                (_, Mode::Free, false) => reports
                    .add(Kind::FreeInFlight, format!("{name} frees {owner} without waiting for {earlier}")),
                (Mode::Allocate, _, false) => {
                    reports.add(
                        Kind::Race,
                        format!("{name} is not ordered after {earlier}, which allocates {owner}"),
                    );
                }
                (_, _, false) => {
                    let (verb, then) = (verb(access.mode), verb(touch.access.mode));
                    reports.add(
                        Kind::Race,
                        format!("{name} {verb} bytes that {earlier} {then}, in {owner}, and no wait orders the two"),
                    );
                }
                (_, _, true) => {}
            }
        }
        if access.mode == Mode::Allocate {
            // The next launch of a graph gets the memory that the last one has freed.
            block.touches.retain(|touch| !clock.knows(touch.at));
        }
        block.touches.retain(|touch| !(clock.knows(touch.at) && touch.is_superseded_by(access)));
        block.touches.push(Touch { access: access.clone(), at, name: name.clone() });
    }
    racing
}

/// Checks an access by the host itself, which knows `clock` to be complete; the operations it should have waited for.
pub fn unawaited(heap: &mut Heap, clock: &Clock, access: &Access) -> Vec<Arc<str>> {
    let Some(block) = heap.holding(access.range.start) else { return Vec::new() };
    let touches = block.touches.iter().filter(|touch| touch.conflicts(access) && !clock.knows(touch.at));
    touches.filter(|touch| touch.access.mode != Mode::Allocate).map(|touch| touch.name.clone()).collect()
}

fn verb(mode: Mode) -> &'static str {
    match mode {
        Mode::Read => "reads",
        _ => "writes",
    }
}
