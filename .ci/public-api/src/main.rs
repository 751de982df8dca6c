//! The public API of the workspace's libraries, held against the lists in `docs/public-api`: a change of it is seen in a diff.
//!
//! `cargo xtask api [--update]`. `cargo doc` writes JSON for it. The pinned toolchain does that if it is told to be a nightly one; only
//! rustdoc is told, so that nothing is built anew.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs};

use serde_json::Value;

/// Where the lists are.
const LISTS: &str = "docs/public-api";

fn main() -> ExitCode {
    // As cargo's rustdoc.
    if env::var_os("FSDP_AS_RUSTDOC").is_some() {
        return rustdoc();
    }
    match run(env::args().any(|argument| argument == "--update")) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs rustdoc with its unstable options.
fn rustdoc() -> ExitCode {
    let status = Command::new("rustdoc").args(env::args_os().skip(1)).env("RUSTC_BOOTSTRAP", "1").status();
    match status {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: rustdoc: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(update: bool) -> Result<(), String> {
    let this = env::current_exe().map_err(|error| error.to_string())?;
    let status = Command::new("cargo")
        .args(["doc", "--quiet", "--workspace", "--no-deps", "--lib"])
        .env("RUSTDOC", this)
        .env("FSDP_AS_RUSTDOC", "1")
        .env("RUSTDOCFLAGS", "-Zunstable-options --output-format json --cap-lints allow")
        .status();
    if !status.map_err(|error| format!("cargo: {error}"))?.success() {
        return Err("cargo doc has failed".to_owned());
    }
    let (libraries, target) = libraries()?;
    let mut changed = Vec::new();
    for library in libraries {
        let json = target.join("doc").join(format!("{}.json", library.replace('-', "_")));
        let api = public_api::Builder::from_rustdoc_json(&json)
            .omit_blanket_impls(true)
            .omit_auto_trait_impls(true)
            .build()
            .map_err(|error| format!("{}: {error}", json.display()))?;
        let list: String = api.items().map(|item| format!("{item}\n")).collect();
        let path = Path::new(LISTS).join(format!("{library}.txt"));
        if update {
            write(&path, &list)?;
        } else if difference(&library, &fs::read_to_string(&path).unwrap_or_default(), &list) {
            changed.push(library);
        }
    }
    if changed.is_empty() {
        return Ok(());
    }
    Err(format!(
        "the public API of {} is not the one in {LISTS}. If the change is meant, note it in CHANGELOG.md and renew the lists \
         by `cargo xtask api --update`",
        changed.join(", ")
    ))
}

fn write(path: &Path, list: &str) -> Result<(), String> {
    let outcome = fs::create_dir_all(LISTS).and_then(|()| fs::write(path, list));
    outcome.map_err(|error| format!("{}: {error}", path.display()))
}

/// The libraries that are published, by name, and where cargo builds.
fn libraries() -> Result<(BTreeSet<String>, PathBuf), String> {
    let mut metadata = Command::new("cargo");
    let output = metadata.args(["metadata", "--no-deps", "--format-version", "1"]).output();
    let output = output.map_err(|error| format!("cargo metadata: {error}"))?;
    let metadata: Value =
        serde_json::from_slice(&output.stdout).map_err(|error| format!("cargo metadata: {error}"))?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let is_library = |package: &&Value| {
        let targets = package["targets"].as_array().into_iter().flatten();
        // `null`: it may be published anywhere.
        package["publish"].is_null() && targets.into_iter().any(|target| target["kind"][0] == "lib")
    };
    let names = packages.filter(is_library).filter_map(|package| package["name"].as_str().map(str::to_owned));
    let target = metadata["target_directory"].as_str().ok_or("cargo metadata names no target directory")?;
    Ok((names.collect(), PathBuf::from(target)))
}

/// Prints the lines that have come and gone; whether there are any.
fn difference(library: &str, before: &str, now: &str) -> bool {
    let [old, new] = [before, now].map(|list| list.lines().collect::<BTreeSet<_>>());
    old.difference(&new).for_each(|line| println!("{library}: - {line}"));
    new.difference(&old).for_each(|line| println!("{library}: + {line}"));
    before != now
}
