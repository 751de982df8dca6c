use fsdp::FsdpUnit;

#[derive(FsdpUnit)]
struct Layer {
    field: Box<dyn Fn(f32) -> f32>,
}

fn main() {}
