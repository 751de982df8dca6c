use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(init = zeros(0.0))]
    weight: Param,
}

fn main() {}
