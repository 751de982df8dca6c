//! Asking a run to stop before its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::TrainError;

/// Asks a run to stop at the end of the step that it is in; the ranks agree on which one that is. Clones ask the same run.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

/// What a shell says of a program that Ctrl-C has ended.
pub const INTERRUPTED: u8 = 130;

impl Stop {
    /// Not asked for yet.
    pub fn new() -> Self {
        Stop::default()
    }

    /// Asks for it. It cannot be taken back.
    pub fn ask(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// It was asked for.
    pub fn asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// One that Ctrl-C asks for, and so does the signal by which a scheduler ends a program (`SIGTERM`). The second time the
    /// program ends at once, without the files that are not finished. To be called once in a program.
    ///
    /// # Errors
    /// The program has handlers of these signals already.
    pub fn at_ctrl_c() -> Result<Self, TrainError> {
        let stop = Stop::new();
        let asked = stop.clone();
        ctrlc::set_handler(move || {
            if asked.asked() {
                end();
            }
            asked.ask();
            eprintln!("stopping at the end of this step; once more to stop at once");
        })
        .map_err(not_listened)?;
        Ok(stop)
    }
}

/// Lets Ctrl-C, and `SIGTERM`, end the program at once, without the files that are not finished. To be called once in a program.
///
/// # Errors
/// The program has handlers of these signals already.
pub fn end_at_ctrl_c() -> Result<(), TrainError> {
    ctrlc::set_handler(end).map_err(not_listened)
}

fn end() {
    fsdp::files::remove_unfinished();
    std::process::exit(INTERRUPTED.into());
}

fn not_listened(error: ctrlc::Error) -> TrainError {
    TrainError::Handler { reason: error.to_string() }
}
