use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(froze)]
    weight: Param,
}

fn main() {}
