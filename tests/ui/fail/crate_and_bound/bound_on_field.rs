use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(bound = "T: FsdpUnit")]
    weight: Param,
}

fn main() {}
