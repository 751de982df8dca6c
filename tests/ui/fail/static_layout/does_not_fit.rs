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

fsdp::assert_fits!(Net, ranks = 8, precision = MixedPrecision::BF16, budget = "2 GiB");

fn main() {}
