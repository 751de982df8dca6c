use fsdp::{FsdpUnit, Param};

fn std() -> f32 {
    0.02
}

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(init = normal(0.0, std()))]
    weight: Param,
}

fn main() {}
