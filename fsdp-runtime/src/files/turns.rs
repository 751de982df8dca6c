//! Who comes next, among calls that several threads of one rank go on with.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::sync::{Condvar, Mutex};

/// Lets one call run at a time, in the order in which they took their turns. If all ranks take them in the same order,
/// the collectives of all calls are in the same order too, whatever threads they are made by.
#[derive(Default)]
pub(crate) struct Turns {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    taken: u64,
    /// Turns before this one are over.
    serving: u64,
    /// Those that are over before their time came.
    over: BTreeSet<u64>,
}

/// A place in the order; over when it is dropped.
#[must_use = "the turn is over when it is dropped"]
pub(crate) struct Turn {
    turns: Arc<Turns>,
    number: u64,
}

impl Turns {
    /// The next turn.
    pub fn take(self: &Arc<Self>) -> Turn {
        let mut queue = self.queue.lock();
        queue.taken += 1;
        Turn { turns: self.clone(), number: queue.taken - 1 }
    }
}

impl Turn {
    /// Waits until all turns before this one are over.
    pub fn wait(&self) {
        let mut queue = self.turns.queue.lock();
        while queue.serving != self.number {
            self.turns.changed.wait(&mut queue);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut queue = self.turns.queue.lock();
        let queue = &mut *queue;
        queue.over.insert(self.number);
        while queue.over.remove(&queue.serving) {
            queue.serving += 1;
        }
        self.turns.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_come_in_the_order_in_which_they_were_taken() {
        let turns = Arc::new(Turns::default());
        let order = Mutex::new(Vec::new());
        let taken: Vec<Turn> = (0..8).map(|_| turns.take()).collect();
        std::thread::scope(|scope| {
            for turn in taken.into_iter().rev() {
                let order = &order;
                // One that nobody waits for holds nobody up.
                if turn.number == 3 {
                    continue;
                }
                scope.spawn(move || {
                    turn.wait();
                    order.lock().push(turn.number);
                });
            }
        });
        assert_eq!(*order.lock(), [0, 1, 2, 4, 5, 6, 7]);
        turns.take().wait();
    }
}
