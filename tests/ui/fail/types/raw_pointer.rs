use fsdp::FsdpUnit;

#[derive(FsdpUnit)]
struct Layer {
    data: *const f32,
}

fn main() {}
