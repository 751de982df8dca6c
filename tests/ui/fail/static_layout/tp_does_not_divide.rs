use fsdp::layout::{StaticLayout, StaticOptions};
use fsdp::prelude::*;

#[derive(FsdpUnit)]
struct Net {
    #[fsdp(tp = row, shape = [4, 6])]
    down: Param,
}

const OF_FOUR: StaticOptions = StaticOptions { tp: 4, ..StaticOptions::DEFAULT };
const _: () = assert!(StaticLayout::of(&Net::TREE, &OF_FOUR).numel() == 6);

fn main() {}
