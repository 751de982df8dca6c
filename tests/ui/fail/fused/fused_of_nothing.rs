use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(fused())]
    qkv: Param,
}

fn main() {}
