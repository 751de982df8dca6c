use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(buffer)]
    mean: Param,
}

fn main() {}
