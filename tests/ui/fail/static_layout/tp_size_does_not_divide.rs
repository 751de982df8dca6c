use fsdp::prelude::*;

#[derive(FsdpUnit)]
struct Linear {
    #[fsdp(shape = [10, 4])]
    weight: Param,
}

#[derive(FsdpUnit)]
#[fsdp(tp_size = 4)]
struct Mlp {
    #[fsdp(tp = column)]
    up: [Linear; 2],
}

fn main() {}
