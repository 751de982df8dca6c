use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Leaf {
    weight: Param,
}

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(shape = [4, 2])]
    module: Leaf,
}

fn main() {}
