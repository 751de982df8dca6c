use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(init = zeros)]
    #[fsdp(init = ones)]
    weight: Param,
}

fn main() {}
