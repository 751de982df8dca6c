use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(frozen = 1)]
    weight: Param,
}

fn main() {}
