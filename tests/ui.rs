//! What compiles and what does not, with the messages users see.

/// One file, one mistake, named for it; the message is in the `.stderr` beside it.
#[test]
fn mistakes_are_explained() {
    trybuild::TestCases::new().compile_fail("tests/ui/fail/*/*.rs");
}

/// Programs that were trouble for other derives, each checked to run.
#[test]
fn unusual_programs_compile() {
    trybuild::TestCases::new().pass("tests/ui/pass/*.rs");
}
