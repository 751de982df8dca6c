#![forbid(unsafe_code)]

use fsdp::prelude::*;

#[derive(FsdpUnit)]
struct Model {
    w: Param,
}

fn change(model: &mut Fsdp<Model>) -> fsdp::Result<()> {
    model.visit_weights(|_, _| model.with_full_params("", |params| Ok(params[0].values.clear())))
}

fn main() {}
