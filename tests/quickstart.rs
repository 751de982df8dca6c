//! `examples/quickstart.rs` as a user runs it.

mod support;

use std::process::Command;

#[test]
fn it_trains_unless_it_is_asked_what_it_does() {
    let program = support::example("quickstart");
    let run = |options: &[&str]| {
        let output = Command::new(&program).args(options).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let help = run(&["--help"]);
    assert!(help.contains("Usage: quickstart") && !help.contains("loss"), "{help}");
    let said = run(&[]);
    let losses: Vec<f64> =
        said.lines().map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
    assert!(losses.len() == 6 && losses[5] < losses[0] / 4.0, "{said}");
}
