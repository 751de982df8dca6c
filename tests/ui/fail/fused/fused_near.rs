use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(fusd("q", "k"))]
    qkv: Param,
}

fn main() {}
