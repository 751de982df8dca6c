use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(init = uniform(-1.0, 1.0f64))]
    weight: Param,
}

fn main() {}
