//! What compiles and what does not, with the messages users see.
//!
//! `tests/ui/fail`: one file, one mistake, named for it, with the message in the `.stderr` beside it.
//! `tests/ui/pass`: programs that were trouble for other derives, each compiled and run. And hundreds of
//! generated items, so that what the derive writes for a mixture of everything is compiled too.

use std::path::PathBuf;

#[path = "../fsdp-derive/src/tests/generate/mod.rs"]
mod generate;

/// Generated items: files, and items in each.
const FILES: u64 = 3;
const ITEMS: u64 = 400;

/// One set of cases, so that the dependencies are built once and in one mode.
#[test]
fn ui() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/ui/fail/*/*.rs");
    cases.pass("tests/ui/pass/*.rs");
    for file in 0..FILES {
        cases.pass(write_items(file));
    }
}

/// Writes a program of generated items. Its seeds are not those of the derive's own tests.
fn write_items(file: u64) -> PathBuf {
    let modules: String = (0..ITEMS)
        .map(|index| generate::valid((1 << 32) + file * ITEMS + index, true).module(&format!("m{index}")))
        .collect();
    let program = format!(
        "#![deny(warnings)]\n#![allow(dead_code, nonstandard_style, unused)]\n\n\
         mod generated {{\npub mod prelude {{\n{}}}\n{modules}}}\n\nfn main() {{}}\n",
        generate::PRELUDE
    );
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("generated_{file}.rs"));
    std::fs::write(&path, program).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    path
}
