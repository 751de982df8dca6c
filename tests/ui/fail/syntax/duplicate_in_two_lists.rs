use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(dtype = "bf16")]
    #[fsdp(dtype = "f32")]
    weight: Param,
}

fn main() {}
