//! What a user does with the files of runs, in one program: `fsdp checkpoint inspect DIR`; `fsdp --help` tells what else it can do.

mod checkpoint;
mod status;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Works with what runs of fully sharded data parallel training have written.
#[derive(Parser)]
#[command(name = "fsdp", version, max_term_width = 110)]
struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Checkpoint(checkpoint::Options),
}

fn main() -> ExitCode {
    let status = match Options::parse().command {
        Command::Checkpoint(options) => checkpoint::run(&options),
    };
    status::exit_code(status)
}
