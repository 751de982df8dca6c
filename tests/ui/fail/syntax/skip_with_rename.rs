use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(skip, rename = "w")]
    weight: Param,
}

fn main() {}
