use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(crate = "fsdp")]
    weight: Param,
}

fn main() {}
