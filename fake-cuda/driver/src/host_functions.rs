//! Host functions that nobody waits for through the driver.

use std::time::Duration;

use crate::queue::{Stream, Work};
use crate::scheduler::advance;
use crate::state::{State, lock};

/// Runs host functions that nothing has needed for a while: the host may wait for one by means of its own.
pub fn run_overdue() {
    const OVERDUE: Duration = Duration::from_millis(50);
    loop {
        std::thread::sleep(Duration::from_millis(10));
        let mut held = lock();
        for stream in 0..held.streams.len() {
            let overdue = |held: &State| {
                held.streams.get(stream).is_some_and(|s| s.has_host_function_older_than(OVERDUE))
            };
            while overdue(&held) && advance(&mut held, stream) {}
        }
    }
}

impl Stream {
    fn has_host_function_older_than(&self, age: Duration) -> bool {
        self.queue.iter().any(|op| matches!(op.work, Work::Host(_, since) if since.elapsed() > age))
    }
}
