use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(buffer)]
    means: Vec<Param>,
}

fn main() {}
