use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(fused("q", "qkv"))]
    qkv: Param,
}

fn main() {}
