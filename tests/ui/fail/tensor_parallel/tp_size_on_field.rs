use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(tp_size = 8)]
    weight: Param,
}

fn main() {}
