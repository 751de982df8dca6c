//! Programs with one wait or record left out.

use std::ffi::CString;
use std::ptr;

use crate::library::control;
use crate::session::{Schedule, Session};

/// What may be left out of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A stream waits for an event (`cuStreamWaitEvent`).
    Wait = 0,
    /// A stream records an event (`cuEventRecord`); it stays where it was recorded before.
    Record = 1,
}

/// Whose steps are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of<'a> {
    /// Those of the streams of a device.
    Device(usize),
    /// Those that the threads of this name take (of which 15 bytes count).
    Thread(&'a str),
}

/// What became of the step to be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftOut {
    /// It has not come.
    NotYet,
    /// It was left out.
    Yes,
    /// It was left out, and the stream waited for nothing by it that it was not ordered after already.
    Redundant,
}

/// A step that no test would miss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Survivor {
    /// Its kind.
    pub step: Step,
    /// Its number among those of its kind, from 0.
    pub nth: u64,
    /// Whether nothing could have missed it: the stream was ordered so without it.
    pub redundant: bool,
}

impl Session {
    /// Leaves out the `nth` step of its kind, from 0, once.
    pub fn leave_out(&self, step: Step, of: Of<'_>, nth: u64) {
        of.with(|thread, device| (control().leave_out)(step as i32, thread, device, nth));
    }

    /// What became of the step to be left out.
    pub fn left_out(&self) -> LeftOut {
        match (control().left_out)() {
            0 => LeftOut::NotYet,
            1 => LeftOut::Yes,
            _ => LeftOut::Redundant,
        }
    }

    /// How many such steps there were so far.
    pub fn steps(&self, step: Step, of: Of<'_>) -> u64 {
        of.with(|thread, device| (control().steps)(step as i32, thread, device))
    }
}

impl Of<'_> {
    /// As the driver takes it: a thread's name or null, and a device.
    fn with<R>(self, f: impl FnOnce(*const std::ffi::c_char, usize) -> R) -> R {
        match self {
            Of::Device(device) => f(ptr::null(), device),
            Of::Thread(name) => f(CString::new(name).expect("a name holds no zero").as_ptr(), 0),
        }
    }
}

/// Runs a program once as it is and once without each of its waits and records, in the latest schedule; returns the
/// steps without which nothing was found and `program` said that all is well.
///
/// `program` returns whether its results are right. Where a step is left out it may fail, but must end: calls that wait
/// for what does not come fail after [`Session::set_patience`]. Panics if it does not hold as it is. Whose steps are
/// left out must take the same ones in every run.
pub fn survivors(of: Of<'_>, program: impl Fn(&Session) -> bool) -> Vec<Survivor> {
    let session = Session::new(Schedule::Latest);
    assert!(program(&session), "the program's results are wrong with all its steps");
    let counts = [Step::Wait, Step::Record].map(|step| (step, session.steps(step, of)));
    drop(session);
    let mut survivors = Vec::new();
    for (step, count) in counts {
        for nth in 0..count {
            let session = Session::new(Schedule::Latest);
            session.leave_out(step, of, nth);
            let right = program(&session);
            let (fate, findings) = (session.left_out(), session.take_findings());
            assert_ne!(fate, LeftOut::NotYet, "{step:?} {nth} of {of:?} was there before and is not now");
            if right && findings.is_empty() {
                survivors.push(Survivor { step, nth, redundant: fate == LeftOut::Redundant });
            }
        }
    }
    survivors
}
