//! A type may have constants of the names that the trait behind the derive has.

#![deny(warnings)]

use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Model {
    weight: Param,
}

impl Model {
    const FIELDS: usize = 3;
    const TREE: &'static str = "oak";
}

trait Named {
    const FIELDS: [&'static str; 1];
}

#[derive(FsdpUnit)]
enum Choice {
    Only(Param),
}

impl Named for Choice {
    const FIELDS: [&'static str; 1] = ["only"];
}

fn fields<M: FsdpUnit>(_: &M) -> usize {
    M::FIELDS.len()
}

pub(crate) fn main() {
    let model = Model { weight: Param::new(1) };
    let choice = Choice::Only(Param::new(1));
    assert_eq!((fields(&model), fields(&choice)), (1, 1));
    assert_eq!((Model::FIELDS, Model::TREE, <Choice as Named>::FIELDS), (3, "oak", ["only"]));
    let Choice::Only(only) = &choice;
    assert_eq!(model.weight.numel() + only.numel(), 2);
}
