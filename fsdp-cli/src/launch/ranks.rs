//! The processes of the ranks: their start, and their ends.

use std::ffi::OsString;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::output::Log;
use super::signals::{self, Forwarding};

/// How long the others have after a rank has failed: they learn of it, and say what they know.
const GRACE: Duration = Duration::from_secs(5);
/// Between a kind word and the end.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Between looks at the processes.
const TICK: Duration = Duration::from_millis(10);
/// Lines of a rank's log that are shown when it has failed.
const LINES: usize = 20;

/// Variables that would lead a rank elsewhere, if the launcher was started with them.
const FOREIGN: [&str; 6] = [
    "FSDP_LISTEN",
    "FSDP_PORT",
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RUN_ID",
    "GROUP_RANK",
];

/// The ranks of a run. Dropping it ends those that run.
pub struct Ranks {
    ranks: Vec<Rank>,
    forwarding: Forwarding,
}

struct Rank {
    number: usize,
    child: Child,
    log: Option<Log>,
    end: Option<ExitStatus>,
}

impl Ranks {
    /// Starts `program` as `size` ranks.
    pub fn start(size: usize, program: &[OsString], logs: Option<&Path>) -> Result<Ranks> {
        let (name, arguments) = program.split_first().context("no program is given")?;
        let forwarding = Forwarding::start().context("signals cannot be heard")?;
        let (port, secret) = (free_port().context("no port is free")?, secret()?);
        if let Some(logs) = logs {
            std::fs::create_dir_all(logs).with_context(|| format!("cannot create `{}`", logs.display()))?;
        }
        let mut ranks = Ranks { ranks: Vec::with_capacity(size), forwarding };
        for number in 0..size {
            let mut command = Command::new(name);
            command.args(arguments).stdin(Stdio::null());
            for variable in FOREIGN {
                command.env_remove(variable);
            }
            for variable in ["RANK", "LOCAL_RANK"] {
                command.env(variable, number.to_string());
            }
            command.env("WORLD_SIZE", size.to_string()).env("MASTER_ADDR", "127.0.0.1");
            command.env("MASTER_PORT", port.to_string()).env("FSDP_TOKEN", &secret);
            if std::env::var_os("CANDLE_NUM_THREADS").is_none() {
                // Each process would have a pool of as many threads as there are cores.
                command.env("CANDLE_NUM_THREADS", "1");
            }
            let mut log = logs.map(|logs| Log::create(logs, number, &mut command)).transpose()?;
            signals::apart(&mut command);
            // Dropping those that have started ends them.
            let mut child = command.spawn().with_context(|| {
                format!("rank {number} cannot be started: `{}`", Path::new(name).display())
            })?;
            if let Some(log) = &mut log {
                log.follow(&mut child);
            }
            ranks.forwarding.add(&child);
            ranks.ranks.push(Rank { number, child, log, end: None });
        }
        Ok(ranks)
    }

    /// Waits until all ranks have ended; the exit status of the run.
    pub fn wait(mut self) -> u8 {
        let mut failed: Option<(Instant, u8)> = None;
        let mut asked = false;
        loop {
            for rank in &mut self.ranks {
                let Some(status) = rank.look(&self.forwarding) else { continue };
                if !status.success() && failed.is_none() {
                    rank.tell(status);
                    failed = Some((Instant::now(), signals::code(status)));
                }
            }
            if self.ranks.iter().all(|rank| rank.end.is_some()) {
                return failed.map_or(0, |(_, code)| code);
            }
            if let Some((when, _)) = failed {
                if when.elapsed() > GRACE && !asked {
                    asked = true;
                    self.forwarding.send(signals::ASK_TO_END);
                }
                if when.elapsed() > GRACE + LAST_WORDS {
                    self.ranks.iter_mut().for_each(Rank::kill);
                }
            }
            thread::sleep(TICK);
        }
    }
}

impl Rank {
    /// How it has ended, told once.
    fn look(&mut self, forwarding: &Forwarding) -> Option<ExitStatus> {
        if self.end.is_some() {
            return None;
        }
        // While no signal is sent: its number may be another process's from then on.
        let status = forwarding.quiet(|pids| {
            let status = self.child.try_wait().ok().flatten()?;
            pids.retain(|pid| *pid != self.child.id());
            // What it has left behind would hold its output open.
            signals::end_group(&self.child);
            Some(status)
        })?;
        self.end = Some(status);
        if let Some(log) = &mut self.log {
            log.finish();
        }
        Some(status)
    }

    fn kill(&mut self) {
        if self.end.is_none() {
            signals::end_group(&self.child);
            let _ = self.child.kill();
        }
    }

    /// Says how it has failed.
    fn tell(&self, status: ExitStatus) {
        let (number, id) = (self.number, self.child.id());
        eprintln!("fsdp launch: rank {number} (process {id}) has failed: {status}");
        if let Some(log) = self.log.as_ref().filter(|_| number != 0) {
            eprint!("{}", log.end(LINES));
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in self.ranks.iter_mut().filter(|rank| rank.end.is_none()) {
            rank.kill();
            let _ = rank.child.wait();
        }
    }
}

/// A port that is free now: rank 0 takes it in a moment.
fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// What only this run's ranks know.
fn secret() -> Result<String> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).context("the system has no random numbers")?;
    Ok(bytes.map(|byte| format!("{byte:02x}")).concat())
}
