use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(init = norml(0.0, 0.02))]
    weight: Param,
}

fn main() {}
