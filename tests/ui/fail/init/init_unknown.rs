use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(init = kaiming)]
    weight: Param,
}

fn main() {}
