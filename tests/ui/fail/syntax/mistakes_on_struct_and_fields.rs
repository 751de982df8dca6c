use candle_core::Tensor;
use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
#[fsdp(rename_al = "camelCase")]
struct Layer {
    #[fsdp(init = normal(1.0))]
    a: Param,
    #[fsdp(shape = [2], tp = row)]
    b: Param,
    c: Tensor,
}

fn main() {}
