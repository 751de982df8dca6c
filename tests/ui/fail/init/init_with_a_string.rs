use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(init = constant("1.0"))]
    weight: Param,
}

fn main() {}
