use fsdp::FsdpUnit;

trait Layers {}

#[derive(FsdpUnit)]
struct Layer {
    layers: Vec<Box<dyn Layers + Send>>,
}

fn main() {}
