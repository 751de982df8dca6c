use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
#[fsdp(crate = "::missing")]
struct Layer {
    weight: Param,
}

fn main() {}
