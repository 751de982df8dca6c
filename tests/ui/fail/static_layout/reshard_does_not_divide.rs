use fsdp::prelude::*;

#[derive(FsdpUnit)]
struct Net {
    #[fsdp(shape = [4, 4])]
    weight: Param,
}

fsdp::assert_fits!(Net, ranks = 8, reshard = ReshardAfterForward::Ranks(3), budget = "80 GiB");

fn main() {}
