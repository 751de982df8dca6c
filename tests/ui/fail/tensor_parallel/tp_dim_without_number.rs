use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(tp = dim(last))]
    weight: Param,
}

fn main() {}
