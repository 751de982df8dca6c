#![forbid(unsafe_code)]

use fsdp::prelude::*;
use fsdp::Ema;

#[derive(FsdpUnit)]
struct Model {
    w: Param,
}

fn swap_twice(model: &mut Fsdp<Model>, average: &mut Ema) -> fsdp::Result<()> {
    model.with_ema(average, |model| average.update(model))
}

fn main() {}
