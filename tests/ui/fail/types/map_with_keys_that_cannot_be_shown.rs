use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    weights: std::collections::BTreeMap<(u8, u8), Param>,
}

fn main() {}
