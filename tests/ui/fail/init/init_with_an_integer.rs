use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(init = constant(1))]
    weight: Param,
}

fn main() {}
