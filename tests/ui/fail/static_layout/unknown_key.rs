use fsdp::prelude::*;

#[derive(FsdpUnit)]
struct Net {
    #[fsdp(shape = [4, 4])]
    weight: Param,
}

fsdp::assert_fits!(Net, rank = 8, budget = "80 GiB");

fn main() {}
