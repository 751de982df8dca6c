use candle_core::Tensor;
use fsdp::FsdpUnit;

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(buffer, fused("mean", "variance"))]
    statistics: Tensor,
}

fn main() {}
