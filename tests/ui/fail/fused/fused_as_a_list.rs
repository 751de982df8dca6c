use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(fused = ["q", "k"])]
    qkv: Param,
}

fn main() {}
