use fsdp::{FsdpUnit, Param, Scope};

#[derive(FsdpUnit)]
struct Layer<'s> {
    weight: Param,
    scope: Scope<'s>,
}

fn main() {}
