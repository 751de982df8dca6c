//! `cargo test` with the seconds of each program and the slowest tests.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use crate::{command, runner};

/// Tests that are named at the end.
const SLOWEST: usize = 10;

/// `cargo test` with these arguments.
pub fn test(arguments: &[&str]) -> Result<(), String> {
    test_in(arguments, &[])
}

/// The same with more environment.
pub fn test_in(arguments: &[&str], environment: &[(&str, &str)]) -> Result<(), String> {
    let cargo = |more: &[&str]| {
        let mut cargo = Command::new("cargo");
        cargo.arg("test").args(more).args(arguments).envs(environment.iter().copied());
        cargo
    };
    let begun = Instant::now();
    command::status(&mut cargo(&["--no-run"]), "cargo test --no-run")?;
    let built = begun.elapsed().as_secs_f64();
    // The doctests, if there are any, are built by the second.
    let begun = Instant::now();
    let file = std::env::temp_dir().join(format!("fsdp-test-times-{}", std::process::id()));
    let this = std::env::current_exe().map_err(|error| format!("this program's own path: {error}"))?;
    let mut command = cargo(&[]);
    command.env(runner::TIMES, &file).env(runner_of_host()?, format!("{} runner", this.display()));
    let outcome = command::status(&mut command, "cargo test");
    let ran = begun.elapsed().as_secs_f64();
    println!("\n== built in {built:.0} s, run in {ran:.0} s");
    print!("{}", report(&read(&file)));
    // There is none where no program has run.
    let _ = std::fs::remove_file(file);
    outcome
}

/// The variable that names what cargo runs programs with.
fn runner_of_host() -> Result<String, String> {
    let output =
        Command::new("rustc").arg("-vV").output().map_err(|error| format!("`rustc -vV`: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let host =
        text.lines().find_map(|line| line.strip_prefix("host: ")).ok_or("`rustc -vV` names no host")?;
    Ok(format!("CARGO_TARGET_{}_RUNNER", host.to_uppercase().replace('-', "_")))
}

/// Program, test and seconds; without a test, of the whole program.
type Time = (String, String, f64);

fn read(file: &Path) -> Vec<Time> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let line = |line: &str| {
        let [program, test, seconds] = line.split('\t').collect::<Vec<_>>().try_into().ok()?;
        Some((program.to_owned(), test.to_owned(), seconds.parse().ok()?))
    };
    text.lines().filter_map(line).collect()
}

/// The programs, and the tests that took longest.
fn report(times: &[Time]) -> String {
    let of = |whole: bool| {
        let mut some: Vec<&Time> = times.iter().filter(|(_, test, _)| test.is_empty() == whole).collect();
        some.sort_by(|a, b| b.2.total_cmp(&a.2));
        some
    };
    let (programs, tests) = (of(true), of(false));
    let mut text = format!("== seconds of {} programs\n", programs.len());
    for (program, _, seconds) in programs {
        text += &format!("{seconds:>8.1}  {program}\n");
    }
    text += &format!("== the slowest {} tests of {}\n", tests.len().min(SLOWEST), tests.len());
    for (program, test, seconds) in tests.into_iter().take(SLOWEST) {
        text += &format!("{seconds:>8.1}  {program}::{test}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_come_first() {
        let time = |program: &str, test: &str, seconds| (program.to_owned(), test.to_owned(), seconds);
        let mut times = vec![time("fast", "", 1.0), time("slow", "", 20.0), time("slow", "longest", 12.0)];
        times.extend((0..12).map(|at| time("fast", &format!("t{at}"), f64::from(at) / 100.0)));
        let text = report(&times);
        let lines: Vec<&str> = text.lines().map(str::trim_start).collect();
        assert_eq!(
            lines[..5],
            [
                "== seconds of 2 programs",
                "20.0  slow",
                "1.0  fast",
                "== the slowest 10 tests of 13",
                "12.0  slow::longest"
            ]
        );
        assert_eq!(lines.len(), 4 + 10, "{text}");
        assert!(!text.contains("fast::t2\n"), "{text}");
    }
}
