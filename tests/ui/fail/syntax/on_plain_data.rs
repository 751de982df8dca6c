use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Norm {
    weight: Param,
    #[fsdp(frozen)]
    eps: f64,
}

fn main() {}
