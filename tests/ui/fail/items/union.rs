use fsdp::FsdpUnit;

#[derive(FsdpUnit)]
union Either {
    a: u32,
    b: f32,
}

fn main() {}
