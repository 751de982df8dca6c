use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
#[fsdp(crate = "not a path")]
struct Layer {
    weight: Param,
}

fn main() {}
