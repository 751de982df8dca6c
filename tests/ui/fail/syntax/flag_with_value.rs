use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(skip = true)]
    weight: Param,
}

fn main() {}
