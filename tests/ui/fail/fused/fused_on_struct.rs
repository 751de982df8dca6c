use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
#[fsdp(fused("q", "k"))]
struct Layer {
    qk: Param,
}

fn main() {}
