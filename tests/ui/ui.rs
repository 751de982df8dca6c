//! What compiles and what does not, with the messages users see.
//!
//! `pass`: programs that were trouble for other derives, each a module with a `main` that is run. `fail`: one file, one
//! mistake, named for it, with the message in the `.stderr` beside it; all are checked by one call of cargo. And hundreds
//! of generated items, so that what the derive writes for a mixture of everything is compiled too.

// Of the whole crate or not at all.
#![deny(future_incompatible)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

macro_rules! programs {
    ($($name:ident,)*) => {
        mod pass {
            $(#[allow(dead_code, clippy::all)] pub(super) mod $name;)*
        }

        $(#[test] fn $name() {
            pass::$name::main();
        })*

        const PROGRAMS: &[&str] = &[$(stringify!($name)),*];
    };
}

programs! {
    cfg,
    const_generics,
    constants_of_the_same_names,
    containers,
    deny_warnings,
    field_names,
    foreign_attributes,
    fused,
    generic_inner,
    items_in_bodies,
    kinds_of_items,
    lifetimes,
    macro_rules,
    no_implicit_prelude,
    raw_identifiers,
    recursive,
    shadowed_names,
    skip_and_walk_one_parameter,
}

#[test]
fn every_program_is_listed() {
    let listed = |file: &std::path::Path| {
        PROGRAMS.iter().any(|name| file.file_name() == Some(format!("{name}.rs").as_ref()))
    };
    let files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/pass")).unwrap();
    let files: Vec<_> = files.map(|file| file.unwrap().path()).filter(|file| !listed(file)).collect();
    assert!(files.is_empty(), "not in `programs!`: {files:?}");
}

macro_rules! generated {
    ($($name:ident)*) => {
        $(#[deny(warnings)]
        #[allow(dead_code, nonstandard_style, unused, clippy::all)]
        mod $name {
            include!(concat!(env!("OUT_DIR"), "/", stringify!($name), ".rs"));
        })*
    };
}

generated!(generated_0 generated_1 generated_2);

/// The programs that must not compile, with the messages that are kept of them.
fn failing() -> Vec<(PathBuf, String)> {
    let inside = |path: &Path| {
        let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
        entries.collect::<Vec<_>>()
    };
    let files = inside(Path::new("fail")).into_iter().flat_map(|topic| inside(&topic));
    let programs = files.filter(|file| file.extension().is_some_and(|extension| extension == "rs"));
    let message = |file: &Path| fs::read_to_string(file.with_extension("stderr")).unwrap_or_default();
    let mut programs: Vec<_> = programs.map(|file| (file.clone(), message(&file))).collect();
    programs.sort();
    programs
}

/// Whether the compiler finds the sources of the standard library (`rust-src`), of which it then shows lines.
fn shows_std() -> bool {
    let sysroot = Command::new("rustc").args(["--print", "sysroot"]).output().unwrap().stdout;
    Path::new(String::from_utf8(sysroot).unwrap().trim()).join("lib/rustlib/src/rust/library").exists()
}

/// Nothing that passes is among them, or each would be a call of cargo. The messages are those of a toolchain without the sources
/// of the standard library: with them, those that name a place there are not compared.
#[test]
fn ui() {
    let shows_std = shows_std();
    let (elsewhere, in_std): (Vec<_>, Vec<_>) =
        failing().into_iter().partition(|(_, message)| !message.contains("$RUST"));
    assert!(elsewhere.len() > 100 && (1..20).contains(&in_std.len()), "{} {}", elsewhere.len(), in_std.len());
    let compared = elsewhere.into_iter().chain(in_std.into_iter().filter(|_| !shows_std));
    let tests = trybuild::TestCases::new();
    let every = if all_are_wanted() { 1 } else { 4 };
    compared.step_by(every).for_each(|(program, _)| tests.compile_fail(program));
}

/// With `FSDP_ALL_PROGRAMS=1`, where messages are to be written anew, or where programs are named; a fourth of them otherwise.
fn all_are_wanted() -> bool {
    let set = |name| std::env::var_os(name).is_some();
    set("FSDP_ALL_PROGRAMS") || set("TRYBUILD") || std::env::args().any(|word| word.starts_with("trybuild="))
}
