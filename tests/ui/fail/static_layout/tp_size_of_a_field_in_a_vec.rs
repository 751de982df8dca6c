use fsdp::prelude::*;

#[derive(FsdpUnit)]
#[fsdp(tp_size = 3)]
struct Heads {
    #[fsdp(tp = column, shape = [4, 2])]
    heads: Vec<Param>,
    #[fsdp(tp = row, shape = [4, 6])]
    out: Param,
}

fn main() {}
