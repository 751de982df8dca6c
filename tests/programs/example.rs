//! Builds the examples, and the program `fsdp`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The program of an example, built in this test's profile: a run of one test target alone does not build examples.
pub fn built(name: &str) -> PathBuf {
    profile(&["--example", name]).join("examples").join(format!("{name}{}", std::env::consts::EXE_SUFFIX))
}

/// A program of the workspace.
#[cfg(unix)]
pub fn built_program(name: &str) -> PathBuf {
    profile(&["--bin", name]).join(format!("{name}{}", std::env::consts::EXE_SUFFIX))
}

/// Builds a target; the directory of this test's profile.
fn profile(target: &[&str]) -> PathBuf {
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--workspace"]).args(target);
    if !cfg!(debug_assertions) {
        build.arg("--release");
    }
    // What makes libtest tell times (xtask/src/runner.rs) would make cargo build all dependencies anew.
    build.env_remove("RUSTC_BOOTSTRAP");
    let build = build.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap();
    assert!(build.success());
    // This test is target/PROFILE/deps/NAME.
    let test = std::env::current_exe().unwrap();
    test.parent().and_then(Path::parent).unwrap().to_path_buf()
}
