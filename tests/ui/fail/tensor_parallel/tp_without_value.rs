use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(tp)]
    weight: Param,
}

fn main() {}
