//! What may run at the same time.

use crate::library::control;
use crate::session::{Session, read_text};

/// An operation that a stream was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Its place in the log.
    pub index: usize,
    /// The name of its stream: see [`Session::name_stream`].
    pub stream: String,
    /// The call or kernel; those of an NCCL group are joined by ` + `.
    pub call: String,
    /// What the thread said that it was for: see [`label`](crate::label).
    pub label: String,
}

impl Session {
    /// From now on, remembers every operation.
    pub fn start_log(&self) {
        (control().start_log)();
    }

    /// The operations since [`Session::start_log`], in the order in which they were submitted; waits are none.
    pub fn operations(&self) -> Vec<Operation> {
        let operation = |(index, line): (usize, &str)| {
            let mut fields = line.split('\t').map(str::to_owned);
            let mut next = || fields.next().unwrap_or_default();
            Operation { index, stream: next(), call: next(), label: next() }
        };
        read_text(control().log).lines().enumerate().map(operation).collect()
    }

    /// Whether two operations may run at the same time: neither waits for the other, by whatever stands between them.
    pub fn may_overlap(&self, a: &Operation, b: &Operation) -> bool {
        let is_ordered = control().is_ordered;
        !is_ordered(a.index, b.index) && !is_ordered(b.index, a.index)
    }
}
