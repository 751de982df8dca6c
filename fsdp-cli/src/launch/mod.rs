//! `fsdp launch`: a program's ranks as processes of this machine.
//!
//! Each process learns its place from its environment, by the variables of `torchrun`, and the run's secret, a new one. The
//! processes are in groups of their own, so that a signal of the terminal reaches them once, from here.

mod output;
mod ranks;
mod signals;

use std::ffi::OsString;
use std::num::NonZero;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use self::ranks::Ranks;

/// Starts a program as several ranks, each a process of this machine. The program calls `launch::distributed` or
/// `Launcher::launch`; the ranks exchange in memory that they share.
///
/// Signals are passed on to all ranks. When a rank fails the others have a few seconds to say what they know, and are ended then.
/// The exit status is that of the rank that failed first, or 128 and the number of the signal that has ended it.
#[derive(Args)]
pub struct Options {
    /// Number of ranks
    #[arg(short, long, value_name = "RANKS")]
    n: NonZero<u16>,
    /// Write what each rank prints to DIR/rank-N.log; only rank 0 prints on the terminal too
    #[arg(long, value_name = "DIR")]
    logs: Option<PathBuf>,
    /// The program, and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// What a shell gives for a program that cannot be started.
const NOT_STARTED: u8 = 127;

/// Starts the ranks and waits for their ends.
pub fn run(options: &Options) -> ExitCode {
    match Ranks::start(usize::from(options.n.get()), &options.program, options.logs.as_deref()) {
        Ok(ranks) => ExitCode::from(ranks.wait()),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(NOT_STARTED)
        }
    }
}
