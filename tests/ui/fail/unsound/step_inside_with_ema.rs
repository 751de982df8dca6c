#![forbid(unsafe_code)]

use fsdp::Ema;
use fsdp::prelude::*;

fn train_the_average<M>(
    model: &mut Fsdp<M>,
    average: &mut Ema,
    optimizer: &mut ShardedOptimizer<AdamW>,
) -> fsdp::Result<bool> {
    model.with_ema(average, |model| optimizer.step(model))
}

fn main() {}
