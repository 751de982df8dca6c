//! Tests in a process of their own.

use std::env;
use std::process::Command;

/// Names the test that the process is for.
const VARIABLE: &str = "FSDP_UNSOUND";

/// Runs `program`, the body of the test `name`, in another process, which must end well: neither by a signal nor by a panic.
#[track_caller]
pub fn apart(name: &str, program: impl FnOnce()) {
    if env::var(VARIABLE).as_deref() == Ok(name) {
        return program();
    }
    let mut test = Command::new(env::current_exe().unwrap());
    let output = test.args([name, "--exact", "--nocapture"]).env(VARIABLE, name).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "`{name}` ended with {}:\n{said}", output.status);
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "there is no test `{name}`");
}
