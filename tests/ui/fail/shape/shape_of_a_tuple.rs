use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(shape = [4, 2])]
    weights: (Param, Param),
}

fn main() {}
