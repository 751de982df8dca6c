//! What compiles and what does not, with the messages users see.
//!
//! `tests/ui/fail`: one file, one mistake, named for it, with the message in the `.stderr` beside it.
//! `tests/ui/pass`: programs that were trouble for other derives, each compiled and run.

/// One set of cases, so that the dependencies are built once and in one mode.
#[test]
fn ui() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/ui/fail/*/*.rs");
    cases.pass("tests/ui/pass/*.rs");
}
