use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(frozen no_decay)]
    weight: Param,
}

fn main() {}
