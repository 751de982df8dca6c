//! Commands that must succeed.

use std::process::Command;

/// Runs `line`, words apart by spaces, with more environment; an error if it fails.
pub fn run(line: &str, environment: &[(&str, &str)]) -> Result<(), String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).envs(environment.iter().copied());
    status(&mut command, line)
}

/// Runs a command, which messages call `name`.
pub fn status(command: &mut Command, name: &str) -> Result<(), String> {
    let status = command.status().map_err(|error| format!("`{name}` does not start: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("`{name}`: {status}")) }
}
