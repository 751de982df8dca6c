use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(frozn)]
    a: Param,
    #[fsdp(dtype = 16)]
    b: Param,
    #[fsdp(skip, no_decay)]
    c: Param,
}

fn main() {}
