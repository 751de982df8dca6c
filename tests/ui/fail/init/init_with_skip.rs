use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(skip, init = ones)]
    weight: Param,
}

fn main() {}
