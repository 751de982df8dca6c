//! The record of a buffer's accesses.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use shuttle::current;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
}

#[derive(Debug)]
struct Access {
    kind: Kind,
    bytes: Range<usize>,
    task: usize,
    /// The task's time at its next release of anything: who has seen that has seen the access.
    time: u32,
}

#[derive(Debug, Default)]
pub(super) struct Shadow {
    /// Never held over a point where the checker may switch.
    accesses: Mutex<Vec<Access>>,
    bomb: AtomicBool,
}

std::thread_local! {
    /// The first race of the present execution. A panic alone could pass for a failure that a test expects.
    static RACE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// The first race since the last call.
pub(crate) fn take_race() -> Option<String> {
    RACE.with(|race| race.borrow_mut().take())
}

impl Shadow {
    pub(super) fn panic_at_next_write(&self) {
        self.bomb.store(true, Ordering::Relaxed);
    }

    pub(super) fn note(&self, kind: Kind, bytes: Range<usize>) {
        if bytes.is_empty() {
            return;
        }
        if kind == Kind::Write && self.bomb.swap(false, Ordering::Relaxed) {
            // No panic hook, which would report a failure of the test.
            std::panic::resume_unwind(Box::new("a write panicked"));
        }
        let task = usize::from(current::me());
        let clock = current::clock();
        let clock: &[u32] = &clock;
        let seen = |access: &Access| {
            access.task == task || clock.get(access.task).is_some_and(|time| *time >= access.time)
        };
        let time = clock.get(task).map_or(0, |time| time + 1);
        let mut accesses = self.accesses.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let overlaps = |access: &Access| access.bytes.start < bytes.end && bytes.start < access.bytes.end;
        for access in accesses.iter().filter(|access| overlaps(access)) {
            if (kind == Kind::Write || access.kind == Kind::Write) && !seen(access) {
                let origin = accesses.iter().map(|access| access.bytes.start).min().unwrap_or(0);
                let race = format!(
                    "race: {kind:?} of bytes {:?} by task {task} is not ordered with the {:?} of bytes {:?} by task {}\n{}",
                    bytes.start - origin.min(bytes.start)..bytes.end - origin.min(bytes.start),
                    access.kind,
                    access.bytes.start - origin..access.bytes.end - origin,
                    access.task,
                    std::backtrace::Backtrace::capture(),
                );
                RACE.with(|first| {
                    first.borrow_mut().get_or_insert(race);
                });
            }
        }
        // What lies behind this access for good need not be kept: who comes after it comes after them.
        let covered = |access: &Access| {
            bytes.start <= access.bytes.start && access.bytes.end <= bytes.end && seen(access)
        };
        accesses.retain(|access| !(covered(access) && (kind == Kind::Write || access.kind == Kind::Read)));
        accesses.push(Access { kind, bytes, task, time });
    }
}
