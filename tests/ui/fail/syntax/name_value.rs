use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp = "skip"]
    weight: Param,
}

fn main() {}
