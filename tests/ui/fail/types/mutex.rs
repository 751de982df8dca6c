use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    field: std::sync::Mutex<Param>,
}

fn main() {}
