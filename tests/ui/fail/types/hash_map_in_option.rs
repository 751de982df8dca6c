use std::collections::HashMap;

use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    experts: Option<HashMap<String, Param>>,
}

fn main() {}
