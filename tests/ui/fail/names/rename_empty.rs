use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(rename = "")]
    weight: Param,
}

fn main() {}
