//! Programs with one wait or record left out.

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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survivor {
    /// Its kind.
    pub step: Step,
    /// The device of its stream.
    pub device: usize,
    /// Its number among those of its kind and device, from 0.
    pub nth: u64,
    /// Whether nothing could have missed it: the stream was ordered so without it.
    pub redundant: bool,
}

impl Session {
    /// Leaves out the `nth` step of its kind, from 0, of the streams of a device, once.
    pub fn leave_out(&self, step: Step, device: usize, nth: u64) {
        (control().leave_out)(step as i32, device, nth);
    }

    /// What became of the step to be left out.
    pub fn left_out(&self) -> LeftOut {
        match (control().left_out)() {
            0 => LeftOut::NotYet,
            1 => LeftOut::Yes,
            _ => LeftOut::Redundant,
        }
    }

    /// How many such steps the streams of a device have made.
    pub fn steps(&self, step: Step, device: usize) -> u64 {
        (control().steps)(step as i32, device)
    }
}

/// Runs a program once as it is and once without each of its waits and records on `device`, in the latest schedule;
/// returns the steps without which nothing was found and `program` said that all is well.
///
/// `program` returns whether its results are right; it may fail where a step is left out, and must then end all the
/// same. Panics if it does not hold as it is. What each thread does on a device must be the same in every run.
pub fn survivors(device: usize, program: impl Fn(&Session) -> bool) -> Vec<Survivor> {
    let session = Session::new(Schedule::Latest);
    assert!(program(&session), "the program's results are wrong with all its steps");
    let counts = [Step::Wait, Step::Record].map(|step| (step, session.steps(step, device)));
    drop(session);
    let mut survivors = Vec::new();
    for (step, count) in counts {
        for nth in 0..count {
            let session = Session::new(Schedule::Latest);
            session.leave_out(step, device, nth);
            let right = program(&session);
            let (fate, findings) = (session.left_out(), session.take_findings());
            assert_ne!(
                fate,
                LeftOut::NotYet,
                "{step:?} {nth} of device {device} came before and does not now"
            );
            if right && findings.is_empty() {
                survivors.push(Survivor { step, device, nth, redundant: fate == LeftOut::Redundant });
            }
        }
    }
    survivors
}
