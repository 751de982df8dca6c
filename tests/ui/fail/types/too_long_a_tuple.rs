use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    weights: (Param, Param, Param, Param, Param, Param, Param, Param, Param, Param, Param, Param, Param),
}

fn main() {}
