#![forbid(unsafe_code)]

use fsdp::prelude::*;

#[derive(FsdpUnit)]
struct Model {
    w: Param,
}

fn twice(model: &mut Fsdp<Model>) -> fsdp::Result<()> {
    model.load_weights(|_, _, outer| model.load_weights(|_, _, inner| Ok(inner.copy_from_slice(outer))))
}

fn main() {}
