use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    weights: Vec<std::rc::Rc<Param>>,
}

fn main() {}
