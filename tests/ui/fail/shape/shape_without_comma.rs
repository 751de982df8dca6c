use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(shape = [4 2])]
    weight: Param,
}

fn main() {}
