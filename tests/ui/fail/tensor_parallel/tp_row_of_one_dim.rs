use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(tp = row, shape = [8])]
    weight: Param,
}

fn main() {}
