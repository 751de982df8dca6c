use std::collections::HashMap;

use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    field: HashMap<String, Param>,
}

fn main() {}
