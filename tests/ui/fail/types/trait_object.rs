use fsdp::FsdpUnit;

trait Layers {}

#[derive(FsdpUnit)]
struct Layer {
    layer: Box<dyn Layers>,
}

fn main() {}
