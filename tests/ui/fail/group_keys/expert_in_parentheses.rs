use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(expert(false))]
    weight: Param,
}

fn main() {}
