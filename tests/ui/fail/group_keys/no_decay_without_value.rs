use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(no_decay =)]
    weight: Param,
}

fn main() {}
