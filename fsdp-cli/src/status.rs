//! How a command ends.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::{Result, anyhow};

/// What the exit status tells, from good to bad.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    Good = 0,
    /// Damaged, or different.
    Bad = 1,
    /// No answer.
    Failed = 2,
}

/// The exit status of a command, of which an error is told.
pub fn exit_code(outcome: Result<Status>) -> ExitCode {
    let status = outcome.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        Status::Failed
    });
    ExitCode::from(status as u8)
}

/// Writes to standard output. A reader that has seen enough is no error.
pub fn print(text: &str) -> Result<()> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(anyhow!("cannot write to standard output: {error}"))
        }
        _ => Ok(()),
    }
}
