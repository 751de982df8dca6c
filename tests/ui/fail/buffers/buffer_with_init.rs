use candle_core::Tensor;
use fsdp::FsdpUnit;

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(buffer, init = zeros)]
    mean: Tensor,
}

fn main() {}
