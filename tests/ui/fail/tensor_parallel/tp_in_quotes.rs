use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(tp = "column")]
    weight: Param,
}

fn main() {}
