use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
#[fsdp(frozen)]
struct Layer {
    weight: Param,
}

fn main() {}
