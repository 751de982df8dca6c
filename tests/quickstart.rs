//! `examples/quickstart.rs` as a user runs it.

use std::path::Path;
use std::process::Command;

/// Its standard output. The program is built in this test's profile: a run of one test target alone does not build examples.
fn run(options: &[&str]) -> String {
    let mut program = Command::new(env!("CARGO"));
    program.args(["run", "--quiet", "--workspace", "--example", "quickstart"]);
    if !cfg!(debug_assertions) {
        program.arg("--release");
    }
    let program = program.current_dir(Path::new(env!("CARGO_MANIFEST_DIR"))).arg("--").args(options);
    let output = program.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn it_trains_unless_it_is_asked_what_it_does() {
    let help = run(&["--help"]);
    assert!(help.contains("Usage: quickstart") && !help.contains("loss"), "{help}");
    let said = run(&[]);
    let losses: Vec<f64> =
        said.lines().map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
    assert!(losses.len() == 6 && losses[5] < losses[0] / 4.0, "{said}");
}
