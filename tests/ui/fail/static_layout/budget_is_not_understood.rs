use fsdp::prelude::*;

#[derive(FsdpUnit)]
struct Net {
    #[fsdp(shape = [4, 4])]
    weight: Param,
}

fsdp::assert_fits!(Net, budget = "80 gigs");

fn main() {}
