use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(fused("q proj", "k_proj"))]
    qkv: Param,
}

fn main() {}
