use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(tie_with = "")]
    weight: Param,
}

fn main() {}
