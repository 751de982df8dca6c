use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(init = 0.5)]
    weight: Param,
}

fn main() {}
