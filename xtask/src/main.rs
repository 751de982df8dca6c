//! `cargo xtask`: what CI runs, what takes too long for every change, and where the time of the tests goes.

use std::path::Path;
use std::process::ExitCode;

mod command;
mod runner;
mod tier;
mod tiers;
mod times;

const HELP: &str = "\
cargo xtask ci [STEP ..]     what CI runs, within 45 minutes from cold on 2 cores; stops at the first step that fails
cargo xtask deep [TIER ..]   what takes too long for every change; a tier that fails does not stop the others
cargo xtask test [ARG ..]    `cargo test ARG ..`, the seconds of each program and the ten slowest tests
cargo xtask api [--update]   compares the public API with the lists in docs/public-api, or renews them

Minutes are those of 2 cores. A step or tier that takes twice as long as stated is told at the end.
";

fn main() -> ExitCode {
    // All paths are from the root of the repository.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the repository");
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    // Run by cargo, in the directory of the test's package.
    if let ["runner", program, rest @ ..] = words.as_slice() {
        return runner::run(program, rest);
    }
    if let Err(error) = std::env::set_current_dir(root) {
        eprintln!("error: {}: {error}", root.display());
        return ExitCode::FAILURE;
    }
    let outcome = match words.as_slice() {
        ["ci", names @ ..] => tier::run(tiers::ci(), names, tier::AfterFailure::Stop, tiers::CI_MINUTES),
        ["deep", names @ ..] => tier::run(tiers::deep(), names, tier::AfterFailure::GoOn, f64::INFINITY),
        ["test", rest @ ..] => times::test(rest),
        ["api", rest @ ..] => tiers::public_api(rest),
        _ => {
            print!("{HELP}\nci:\n{}\ndeep:\n{}", tier::list(&tiers::ci()), tier::list(&tiers::deep()));
            return ExitCode::from(if words.is_empty() || words == ["--help"] { 0 } else { 2 });
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
