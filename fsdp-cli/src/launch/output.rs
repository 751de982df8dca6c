//! What ranks print, kept in files.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;

use anyhow::{Context, Result};

/// A rank's log: its standard output and errors, in the order in which they came.
pub struct Log {
    path: PathBuf,
    file: File,
    /// Of rank 0, which prints on the terminal too: what copies each of both.
    copies: Vec<JoinHandle<()>>,
}

impl Log {
    /// Makes the file, and has `command` print to it.
    pub fn create(directory: &Path, rank: usize, command: &mut Command) -> Result<Log> {
        let path = directory.join(format!("rank-{rank}.log"));
        let failed = || format!("cannot write `{}`", path.display());
        let file = File::options().create(true).append(true).open(&path).with_context(failed)?;
        file.set_len(0).with_context(failed)?;
        if rank == 0 {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        } else {
            let copy = || file.try_clone().with_context(failed);
            command.stdout(copy()?).stderr(copy()?);
        }
        Ok(Log { path, file, copies: Vec::new() })
    }

    /// Copies what the process prints, if that is not to the file.
    pub fn follow(&mut self, child: &mut Child) {
        if let Some(from) = child.stdout.take() {
            self.copy(from, io::stdout());
        }
        if let Some(from) = child.stderr.take() {
            self.copy(from, io::stderr());
        }
    }

    fn copy(&mut self, mut from: impl Read + Send + 'static, mut to: impl Write + Send + 'static) {
        let Ok(mut file) = self.file.try_clone() else { return };
        self.copies.push(std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                // A reader that has seen enough ends neither the run nor the file.
                let _ = to.write_all(&bytes[..count]).and_then(|()| to.flush());
                let _ = file.write_all(&bytes[..count]);
            }
        }));
    }

    /// The process has ended: what it has printed is in the file when this returns.
    pub fn finish(&mut self) {
        self.copies.drain(..).for_each(|copy| drop(copy.join()));
    }

    /// The last lines, and where the others are.
    pub fn end(&self, lines: usize) -> String {
        let text = fs::read(&self.path).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let all: Vec<&str> = text.lines().collect();
        let last = &all[all.len().saturating_sub(lines)..];
        let mut shown = format!("the end of `{}`:\n", self.path.display());
        last.iter().for_each(|line| shown += &format!("  {line}\n"));
        shown
    }
}
