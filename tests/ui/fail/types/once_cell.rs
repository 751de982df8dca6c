use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    weights: Vec<std::cell::OnceCell<Param>>,
}

fn main() {}
