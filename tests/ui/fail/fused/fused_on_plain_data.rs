use fsdp::{FsdpUnit};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(fused("q", "k"))]
    qkv: usize,
}

fn main() {}
