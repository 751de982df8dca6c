use candle_core::Tensor;
use fsdp::FsdpUnit;

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(buffer, shape = [4])]
    mean: Tensor,
}

fn main() {}
