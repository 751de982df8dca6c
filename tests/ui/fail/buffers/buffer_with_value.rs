use candle_core::Tensor;
use fsdp::FsdpUnit;

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(buffer = true)]
    mean: Tensor,
}

fn main() {}
