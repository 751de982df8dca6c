use fsdp::prelude::*;

#[derive(FsdpUnit)]
struct Block {
    #[fsdp(shape = [4096, 4096])]
    weight: Param,
}

#[derive(FsdpUnit)]
struct Net {
    layers: [Unit<Block>; 64],
}

fsdp::assert_fits!(
    Net,
    ranks = 8,
    outer = OuterStrategy::Optim,
    outer_ranks = 2,
    precision = MixedPrecision::BF16,
    reshard = ReshardAfterForward::Ranks(2),
    prefetch = 3,
    no_sync = true,
    budget = "2 GiB",
);

fn main() {}
