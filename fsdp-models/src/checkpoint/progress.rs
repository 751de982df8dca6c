//! Reports the progress of long work.

use std::io::{self, IsTerminal};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar on standard error, if that is a terminal: it is gone when the work is done.
#[derive(Debug)]
pub struct WorkProgress {
    bar: ProgressBar,
}

impl WorkProgress {
    /// For work that `what` names: `verifying`.
    pub fn new(what: &str) -> Self {
        if !io::stderr().is_terminal() {
            return WorkProgress { bar: ProgressBar::hidden() };
        }
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        // The template is a constant; were it wrong, indicatif's own style would do.
        if let Ok(style) =
            ProgressStyle::with_template("{msg} [{wide_bar:.cyan/blue}] {percent:>3} %  ETA {eta}")
        {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(what.to_owned());
        WorkProgress { bar }
    }

    /// `done` of `total` are done, in any unit.
    pub fn set(&self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.bar.set_position(done);
    }
}

impl Drop for WorkProgress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
