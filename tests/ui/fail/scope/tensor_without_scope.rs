use candle_core::{Result, Tensor};
use fsdp::Param;

fn read(weight: &Param) -> Result<Tensor> {
    weight.tensor()
}

fn main() {}
