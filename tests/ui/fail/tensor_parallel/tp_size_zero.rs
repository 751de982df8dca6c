use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
#[fsdp(tp_size = 0)]
struct Layer {
    up_proj: Param,
}

fn main() {}
