//! What every rank must have done alike, although no collective carries it: steps with their settings, loads, resets,
//! the kind of a microbatch, how far ahead it gathers. It is noted on the communicators, which compare it.

use super::core::Engine;
use crate::pipeline::{Prefetch, Sync};

impl Engine {
    /// The last thing that has changed the weights or given up gradients: `after step 3 by ..`.
    pub(crate) fn note_event(&self, event: String) {
        self.state.lock().event = event;
        self.note_state();
    }

    /// Sets what is reduced after the next backward.
    pub(crate) fn set_sync(&self, sync: Sync) {
        self.state.lock().sync = sync;
        self.note_state();
    }

    /// To be called when anything of it has changed.
    pub(crate) fn note_state(&self) {
        let state = {
            let state = self.state.lock();
            let microbatch = match state.sync {
                Sync::Step => "the last microbatch",
                Sync::Microbatch => "a microbatch that is not the last",
                Sync::Nothing => "a microbatch under `no_sync`",
            };
            let Prefetch { forward, backward } = state.gather.prefetch_depths();
            let ahead = if (forward, backward) == (self.config.prefetch, self.config.prefetch) {
                String::new()
            } else {
                format!(", with {forward} units gathered ahead in forwards and {backward} in backwards")
            };
            format!("{}, in {microbatch}{ahead}", state.event)
        };
        for comm in [&self.comm, &self.shard_comm, &self.outer_comm] {
            comm.note(&state);
        }
    }
}
