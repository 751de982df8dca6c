use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    field: Vec<(String, Param)>,
}

fn main() {}
