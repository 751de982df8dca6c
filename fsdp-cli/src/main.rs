//! What a user does around runs, in one program: `fsdp launch -n 4 -- PROGRAM`, `fsdp checkpoint inspect DIR`; `fsdp --help` tells what
//! else it can do.

mod checkpoint;
mod launch;
mod status;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Starts runs of fully sharded data parallel training, and works with what they have written.
#[derive(Parser)]
#[command(name = "fsdp", version, max_term_width = 110)]
struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Checkpoint(checkpoint::Options),
    Launch(launch::Options),
}

fn main() -> ExitCode {
    match Options::parse().command {
        Command::Checkpoint(options) => status::exit_code(checkpoint::run(&options)),
        Command::Launch(options) => launch::run(&options),
    }
}
