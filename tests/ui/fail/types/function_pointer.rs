use fsdp::FsdpUnit;

#[derive(FsdpUnit)]
struct Layer {
    activation: fn(f32) -> f32,
}

fn main() {}
