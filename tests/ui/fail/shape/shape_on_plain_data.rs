use fsdp::FsdpUnit;

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(shape = [2])]
    betas: [f32; 2],
}

fn main() {}
