use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(tp = column, shape = [])]
    weight: Param,
}

fn main() {}
