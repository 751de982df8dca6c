use fsdp::prelude::*;

#[derive(FsdpUnit)]
struct Model {
    layer: Param,
}

fn replace(model: &mut Fsdp<Model>) {
    model.module().layer = Param::new(4);
}

fn main() {}
