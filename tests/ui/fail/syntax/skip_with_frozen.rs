use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(skip, frozen)]
    weight: Param,
}

fn main() {}
