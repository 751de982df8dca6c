use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(tie_with = "embed.weight", fused("q", "k"))]
    qkv: Param,
}

fn main() {}
