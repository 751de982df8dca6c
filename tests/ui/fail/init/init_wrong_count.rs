use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(init = normal(0.02))]
    weight: Param,
}

fn main() {}
