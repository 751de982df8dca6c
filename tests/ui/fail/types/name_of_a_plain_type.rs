use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct String {
    weight: Param,
}

#[derive(FsdpUnit)]
struct Layer {
    string: String,
}

fn main() {}
