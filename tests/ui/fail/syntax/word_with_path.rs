use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(fsdp::skip)]
    weight: Param,
}

fn main() {}
