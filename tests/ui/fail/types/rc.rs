use std::rc::Rc;

use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    field: Rc<Param>,
}

fn main() {}
