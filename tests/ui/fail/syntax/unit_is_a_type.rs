use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(unit)]
    weight: Param,
}

fn main() {}
