//! What compiles and what does not, with the messages users see.
//!
//! `pass`: programs that were trouble for other derives, each a module with a `main` that is run. `fail`: one file, one
//! mistake, named for it, with the message in the `.stderr` beside it; all are checked by one call of cargo. And hundreds
//! of generated items, so that what the derive writes for a mixture of everything is compiled too.

// Of the whole crate or not at all.
#![deny(future_incompatible)]

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

/// Nothing that passes is among them, or each would be a call of cargo.
#[test]
fn ui() {
    trybuild::TestCases::new().compile_fail("fail/*/*.rs");
}
