use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(skip, unit)]
    weight: Param,
}

fn main() {}
