use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Leaf {
    weight: Param,
}

#[derive(FsdpUnit)]
struct Layer<'a> {
    shared: &'a Leaf,
}

fn main() {}
