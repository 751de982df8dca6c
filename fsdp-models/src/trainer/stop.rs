//! Asks a run to stop before its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::TrainError;

/// What a shell says of a program that Ctrl-C has ended.
pub const INTERRUPTED: u8 = 130;

/// Asks a run to stop at the end of the step that it is in; the ranks agree on which one that is. Clones ask the same run.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<State>);

#[derive(Debug, Default)]
struct State {
    asked: AtomicBool,
    /// Ranks that are in steps, of which one is to be the last.
    training: AtomicUsize,
}

impl Stop {
    /// Not asked for yet.
    pub fn new() -> Self {
        Stop::default()
    }

    /// Asks for it. It cannot be taken back.
    pub fn ask(&self) {
        self.0.asked.store(true, Ordering::Relaxed);
    }

    /// It was asked for.
    pub fn asked(&self) -> bool {
        self.0.asked.load(Ordering::Relaxed)
    }

    /// A rank begins its steps, until what is returned is dropped.
    pub(super) fn training(&self) -> Training<'_> {
        self.0.training.fetch_add(1, Ordering::Relaxed);
        Training(self)
    }

    /// One that Ctrl-C asks for while ranks train, and so does every other signal by which terminals and schedulers ask a program
    /// to end: `SIGINT`, `SIGTERM`, `SIGHUP` (unless it is ignored, as by `nohup`), `SIGUSR1` and `SIGUSR2`. The second time, and
    /// when no rank trains, the program ends at once, without the files that are not finished.
    ///
    /// To be called once. Where there are no such signals, it is never asked for.
    ///
    /// # Errors
    /// The system has no thread for it.
    pub fn at_ctrl_c() -> Result<Self, TrainError> {
        let stop = Stop::new();
        let asked = stop.clone();
        signals::each(move || {
            if asked.asked() || asked.0.training.load(Ordering::Relaxed) == 0 {
                fsdp::files::remove_unfinished();
                std::process::exit(INTERRUPTED.into());
            }
            asked.ask();
            eprintln!("stopping at the end of this step; once more to stop at once");
        })
        .map_err(|error| TrainError::Signals { reason: error.to_string() })?;
        Ok(stop)
    }
}

/// A rank that trains.
pub(super) struct Training<'a>(&'a Stop);

impl Drop for Training<'_> {
    fn drop(&mut self) {
        self.0.0.training.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(unix)]
mod signals {
    use std::ffi::c_int;
    use std::mem::MaybeUninit;
    use std::{io, thread};

    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
    use signal_hook::iterator::Signals;

    /// The signals that ask a program to end, and would end it at once, with nothing saved: Ctrl-C (`SIGINT`); `kill`, a shutdown,
    /// a scheduler whose time is up (`SIGTERM`); a terminal that is closed, a connection that is lost (`SIGHUP`); the warnings of
    /// schedulers before they end a job (`SIGUSR1`, `SIGUSR2`: `sbatch --signal=USR1`, `qsub -notify`, `bsub -wa USR2`). `SIGQUIT`
    /// asks for a core dump, not for an end.
    const ENDING: [c_int; 5] = [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2];

    /// Whether the program was started to live on whatever happens to its terminal, as `nohup` starts it.
    fn hangups_are_ignored() -> bool {
        let mut action = MaybeUninit::uninit();
        // SAFETY: without a new action sigaction only fills the old one, which is read where it says that it did.
        unsafe {
            libc::sigaction(SIGHUP, std::ptr::null(), action.as_mut_ptr()) == 0
                && action.assume_init().sa_sigaction == libc::SIG_IGN
        }
    }

    /// Calls `act` for each of the signals that ask a program to end, on a thread that waits for them.
    pub fn each(act: impl Fn() + Send + 'static) -> io::Result<()> {
        // A handler would take the place of the ignoring.
        let is_heard = |signal: &c_int| *signal != SIGHUP || !hangups_are_ignored();
        let mut signals = Signals::new(ENDING.into_iter().filter(is_heard))?;
        let wait = move || signals.forever().for_each(|_| act());
        thread::Builder::new().name("signals".into()).spawn(wait).map(drop)
    }
}

#[cfg(not(unix))]
mod signals {
    pub fn each(_: impl Fn() + Send + 'static) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_ask_the_same_run() {
        let stop = Stop::new();
        let other = stop.clone();
        assert!(!stop.asked());
        other.ask();
        assert!(stop.asked());
        let training = [stop.training(), other.training()];
        assert_eq!(stop.0.training.load(Ordering::Relaxed), 2);
        drop(training);
        assert_eq!(stop.0.training.load(Ordering::Relaxed), 0);
    }
}
