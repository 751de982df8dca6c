use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
#[fsdp(crate)]
struct Layer {
    up_proj: Param,
}

fn main() {}
