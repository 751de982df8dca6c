use fsdp::FsdpUnit;

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(buffer)]
    mean: f32,
}

fn main() {}
