//! What cargo runs test programs with: it notes how long each test takes.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

/// The file that lines are added to, of program, test and seconds; without a test, of the whole program.
pub const TIMES: &str = "FSDP_TEST_TIMES";

/// Runs a test program, with the seconds of each test on its output.
pub fn run(program: &str, arguments: &[&str]) -> ExitCode {
    match timed(program, arguments) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("error: {program}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn timed(program: &str, arguments: &[&str]) -> std::io::Result<u8> {
    let mut command = Command::new(program);
    command.args(arguments);
    let name = test_program(program).map(str::to_owned);
    if name.as_ref().is_some_and(|name| name != "ui") {
        // Only nightly's libtest tells times by itself. Not for the programs that must not compile: they are built
        // by a cargo that would inherit this, and take it for another compiler.
        command.env("RUSTC_BOOTSTRAP", "1").args(["-Zunstable-options", "--report-time"]);
    }
    let begun = Instant::now();
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let mut times = String::new();
    let (mut output, mut line) = (BufReader::new(child.stdout.take().expect("it is piped")), Vec::new());
    while output.read_until(b'\n', &mut line)? > 0 {
        std::io::stdout().write_all(&line)?;
        if let (Some(name), Some((test, seconds))) = (&name, parse(&String::from_utf8_lossy(&line))) {
            times += &format!("{name}\t{test}\t{seconds}\n");
        }
        line.clear();
    }
    let status = child.wait()?;
    if let (Some(name), Some(path)) = (&name, std::env::var_os(TIMES)) {
        times += &format!("{name}\t\t{}\n", begun.elapsed().as_secs_f64());
        OpenOptions::new().append(true).create(true).open(path)?.write_all(times.as_bytes())?;
    }
    // A signal has no code.
    Ok(status.code().map_or(101, |code| code as u8))
}

/// The name of a program that cargo has built from tests: those lie in `deps` as NAME-HASH. Others are examples, or
/// of doctests.
fn test_program(program: &str) -> Option<&str> {
    let path = Path::new(program);
    let in_deps = path.parent()?.file_name()? == "deps";
    let (name, hash) = path.file_stem()?.to_str()?.rsplit_once('-')?;
    (in_deps && hash.len() == 16).then_some(name)
}

/// Test and seconds of a line `test NAME ... ok <0.123s>`.
fn parse(line: &str) -> Option<(&str, f64)> {
    let (test, outcome) = line.trim_end().strip_prefix("test ")?.split_once(" ... ")?;
    let seconds = outcome.rsplit_once('<')?.1.strip_suffix("s>")?;
    Some((test.trim_end_matches(" - should panic"), seconds.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_tests_are_read() {
        assert_eq!(parse("test a::b ... ok <1.250s>\n"), Some(("a::b", 1.25)));
        assert_eq!(parse("test a - should panic ... ok <0.001s>\n"), Some(("a", 0.001)));
        assert_eq!(parse("test a::b ... FAILED <12.000s>\n"), Some(("a::b", 12.0)));
        assert_eq!(parse("test a::b ... ok\n"), None);
        assert_eq!(parse("test result: ok. 3 passed; finished in 1.00s\n"), None);
    }

    #[test]
    fn programs_of_tests_are_known() {
        assert_eq!(
            test_program("/t/debug/deps/layout_properties-0123456789abcdef"),
            Some("layout_properties")
        );
        assert_eq!(test_program("/t/debug/examples/finetune-0123456789abcdef"), None);
        assert_eq!(test_program("/t/rustdoctest/rust_out"), None);
    }
}
