use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(dtype = bf16)]
    weight: Param,
}

fn main() {}
