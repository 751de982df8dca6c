use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(tp = dim(3), shape = [8, 4])]
    weight: Param,
}

fn main() {}
