use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(fused("q", "k"), rename = "qk")]
    qkv: Param,
}

fn main() {}
