use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(frozen, frozen)]
    weight: Param,
}

fn main() {}
