use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(learning_rate = 0.1)]
    weight: Param,
}

fn main() {}
