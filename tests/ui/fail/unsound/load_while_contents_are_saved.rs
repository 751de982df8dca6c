#![forbid(unsafe_code)]

use fsdp::checkpoint::{Checkpoints, Contents};
use fsdp::prelude::*;

#[derive(FsdpUnit)]
struct Model {
    w: Param,
}

fn save(model: &mut Fsdp<Model>) -> fsdp::Result<()> {
    let contents = Contents::of(model);
    model.load_weights(|_, _, values| Ok(values.fill(1.0)))?;
    Checkpoints::new("run").save(contents).map(drop)
}

fn main() {}
