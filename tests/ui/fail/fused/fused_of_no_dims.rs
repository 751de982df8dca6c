use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(fused("q", "k"), shape = [])]
    qkv: Param,
}

fn main() {}
