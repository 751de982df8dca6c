use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(fused("q", "k"))]
    qkv: Param,
    #[fsdp(fused("k", "v"))]
    kv: Param,
}

fn main() {}
