#![forbid(unsafe_code)]

use fsdp::prelude::*;

#[derive(FsdpUnit)]
struct Model {
    w: Param,
}

fn keep(model: &mut Fsdp<Model>) -> fsdp::Result<()> {
    let mut kept: Option<&mut [f32]> = None;
    model.load_weights(|_, _, values| {
        kept = Some(values);
        Ok(())
    })
}

fn main() {}
