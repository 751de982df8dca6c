use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(rename = "kernel", tie_with = "kernel")]
    weight: Param,
}

fn main() {}
