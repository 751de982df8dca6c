use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(dtype)]
    weight: Param,
}

fn main() {}
