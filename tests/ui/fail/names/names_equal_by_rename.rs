use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    weight: Param,
    #[fsdp(rename = "weight")]
    kernel: Param,
}

fn main() {}
