use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(fused("q", "k", "q"))]
    qkv: Param,
}

fn main() {}
