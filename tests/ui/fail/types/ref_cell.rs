use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    weight: std::cell::RefCell<Param>,
}

fn main() {}
