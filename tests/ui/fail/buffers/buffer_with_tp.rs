use candle_core::Tensor;
use fsdp::FsdpUnit;

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(buffer, tp = row)]
    mean: Tensor,
}

fn main() {}
