use candle_core::Tensor;
use fsdp::FsdpUnit;

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(bufer)]
    mean: Tensor,
}

fn main() {}
