use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(dtype = "fp16")]
    weight: Param,
}

fn main() {}
