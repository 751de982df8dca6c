//! What was submitted, for tests of what may run at the same time.

use crate::clock::Clock;
use crate::queue::{Position, Stream};

/// An operation as it was submitted.
struct Entry {
    call: String,
    label: String,
    at: Position,
    /// What is complete before it.
    after: Clock,
}

#[derive(Default)]
pub struct Log(Vec<Entry>);

impl Log {
    pub fn add(&mut self, call: &str, label: &str, at: Position, after: Clock) {
        self.0.push(Entry { call: call.to_owned(), label: label.to_owned(), at, after });
    }

    /// A line each: the stream's name, a tab, the call, a tab, the label.
    pub fn text(&self, streams: &[Stream]) -> String {
        let line =
            |entry: &Entry| format!("{}\t{}\t{}\n", streams[entry.at.stream].name, entry.call, entry.label);
        self.0.iter().map(line).collect()
    }

    pub fn is_ordered(&self, earlier: usize, later: usize) -> bool {
        let (earlier, later) = (self.0.get(earlier), self.0.get(later));
        earlier.zip(later).is_some_and(|(earlier, later)| later.after.knows(earlier.at))
    }
}
