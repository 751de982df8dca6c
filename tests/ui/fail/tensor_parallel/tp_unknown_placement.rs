use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(tp = colum)]
    weight: Param,
}

fn main() {}
