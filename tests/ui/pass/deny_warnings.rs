//! The expansion is free of warnings.

#![deny(warnings, missing_docs, unused, nonstandard_style, rust_2018_idioms)]
#![deny(single_use_lifetimes, unused_qualifications, unused_lifetimes, unreachable_pub, trivial_casts)]

use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Model<'a, T> {
    #[fsdp(frozen, no_decay, expert, tp = column, dtype = "bf16", tie_with = "inner")]
    weight: Param,
    inner: Vec<T>,
    name: &'a str,
    label: String,
    #[deprecated]
    old: Param,
}

#[derive(FsdpUnit)]
enum Choice {
    One { weight: Param },
    Two(Param, u8),
    #[deprecated]
    Three,
}

#[derive(FsdpUnit)]
struct Empty;

#[derive(FsdpUnit)]
enum Never {}

fn assert_modules<A: FsdpUnit, B: FsdpUnit, C: FsdpUnit>(_: &A, _: &B, _: &C) {}

pub(crate) fn main() {
    #[allow(deprecated)]
    let model = Model {
        weight: Param::new(1),
        inner: vec![Empty],
        name: "n",
        label: String::new(),
        old: Param::new(1),
    };
    #[allow(deprecated)]
    let choices = [Choice::One { weight: Param::new(1) }, Choice::Two(Param::new(1), 2), Choice::Three];
    for choice in &choices {
        match choice {
            Choice::One { weight } => assert_eq!(weight.numel(), 1),
            Choice::Two(weight, other) => assert_eq!(weight.numel() + usize::from(*other), 3),
            #[allow(deprecated)]
            Choice::Three => {}
        }
    }
    let never: Option<Never> = None;
    assert_modules(&model, &choices, &never);
    #[allow(deprecated)]
    let _ = (&model.weight, model.inner.len(), model.name, &model.label, &model.old);
}
