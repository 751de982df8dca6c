use fsdp::layout::{StaticLayout, StaticOptions};
use fsdp::prelude::*;

#[derive(FsdpUnit)]
struct Net {
    #[fsdp(shape = [10, 4])]
    embed: Param,
    #[fsdp(tie_with = "embed", shape = [4, 10])]
    head: Param,
}

const _: () = assert!(StaticLayout::of(&Net::TREE, &StaticOptions::DEFAULT).numel() == 40);

fn main() {}
