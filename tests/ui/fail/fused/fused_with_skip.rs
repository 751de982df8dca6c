use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(fused("q", "k"), skip)]
    qkv: Param,
}

fn main() {}
