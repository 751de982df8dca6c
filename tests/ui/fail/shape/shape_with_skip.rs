use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(skip, shape = [4])]
    weight: Param,
}

fn main() {}
