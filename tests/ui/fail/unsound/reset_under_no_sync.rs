#![forbid(unsafe_code)]

use fsdp::prelude::*;

#[derive(FsdpUnit)]
struct Model {
    w: Param,
}

fn reset(model: &mut Fsdp<Model>) -> fsdp::Result<()> {
    let guard = model.no_sync();
    model.reset_step()?;
    drop(guard);
    Ok(())
}

fn main() {}
