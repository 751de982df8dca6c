//! Signals: passed on to the ranks, and what they mean in an exit status.

use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex, PoisonError};

/// Passes the signals that ask a program to end on to all ranks.
pub struct Forwarding(Arc<Mutex<Vec<u32>>>);

impl Forwarding {
    /// Hears them from now on.
    pub fn start() -> std::io::Result<Forwarding> {
        let forwarding = Forwarding(Arc::default());
        let heard = Forwarding(forwarding.0.clone());
        system::each(move |signal| heard.send(signal))?;
        Ok(forwarding)
    }

    /// A rank that gets them too.
    pub fn add(&self, child: &Child) {
        self.quiet(|pids| pids.push(child.id()));
    }

    /// Sends a signal to all ranks that run.
    pub fn send(&self, signal: i32) {
        self.quiet(|pids| pids.iter().for_each(|pid| system::send(*pid, signal)));
    }

    /// Does `work`, with the numbers of the processes that run; no signal is sent meanwhile.
    pub fn quiet<T>(&self, work: impl FnOnce(&mut Vec<u32>) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The signal that asks a program to end.
pub const ASK_TO_END: i32 = system::ASK_TO_END;

/// The exit status of a shell for a program that has ended so.
pub fn code(status: ExitStatus) -> u8 {
    match status.code() {
        Some(code) => u8::try_from(code).unwrap_or(1),
        None => system::code(status),
    }
}

/// Ends a rank with all that it has started, or what it has left behind.
pub fn end_group(child: &Child) {
    system::send(child.id(), system::END);
}

/// Has the process be the first of a group of its own, and end when this one does, in whatever way.
pub fn apart(command: &mut Command) {
    system::apart(command);
}

#[cfg(unix)]
mod system {
    use std::os::unix::process::{CommandExt, ExitStatusExt};
    use std::process::{Command, ExitStatus};
    use std::{io, thread};

    use signal_hook::consts::{SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR1, SIGUSR2};
    use signal_hook::iterator::Signals;

    pub const ASK_TO_END: i32 = SIGTERM;
    pub const END: i32 = SIGKILL;

    pub fn each(act: impl Fn(i32) + Send + 'static) -> io::Result<()> {
        let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2])?;
        let wait = move || signals.forever().for_each(act);
        thread::Builder::new().name("signals".into()).spawn(wait).map(drop)
    }

    /// To a process and its group, as a terminal does: the process may be a shell that has started the program.
    pub fn send(process: u32, signal: i32) {
        // SAFETY: a call with two numbers. The process is the first of its group and a child that was not waited for, or was a
        // moment ago: the number is the group's while any of it runs, and no other's so soon after.
        unsafe { libc::kill(-process.cast_signed(), signal) };
    }

    pub fn code(status: ExitStatus) -> u8 {
        status.signal().and_then(|signal| u8::try_from(128 + signal).ok()).unwrap_or(1)
    }

    pub fn apart(command: &mut Command) {
        command.process_group(0);
        #[cfg(target_os = "linux")]
        // SAFETY: between fork and exec the child makes two system calls, and nothing else.
        unsafe {
            let launcher = libc::getpid();
            command.pre_exec(move || {
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                    return Err(io::Error::last_os_error());
                }
                // The launcher may be gone already.
                if libc::getppid() == launcher { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
            });
        }
    }
}

#[cfg(not(unix))]
mod system {
    use std::process::{Command, ExitStatus};

    pub const ASK_TO_END: i32 = 0;
    pub const END: i32 = 0;

    pub fn each(_: impl Fn(i32) + Send + 'static) -> std::io::Result<()> {
        Ok(())
    }

    pub fn send(_: u32, _: i32) {}

    pub fn code(_: ExitStatus) -> u8 {
        1
    }

    pub fn apart(_: &mut Command) {}
}
