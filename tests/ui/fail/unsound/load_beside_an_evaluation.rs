#![forbid(unsafe_code)]

use candle_core::Tensor;
use fsdp::prelude::*;

fn beside<M: Forward + Send>(model: &mut Fsdp<M>, x: &Tensor) -> fsdp::Result<Tensor> {
    std::thread::scope(|threads| {
        threads.spawn(|| model.load_weights(|_, _, values| Ok(values.fill(1.0))));
        model.evaluate(x)
    })
}

fn main() {}
