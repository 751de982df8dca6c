use fsdp::{FsdpUnit, Param};

fn width() -> usize {
    8
}

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(shape = [width()])]
    weight: Param,
}

fn main() {}
