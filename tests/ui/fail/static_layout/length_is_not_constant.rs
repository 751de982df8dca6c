use fsdp::layout::{StaticLayout, StaticOptions};
use fsdp::prelude::*;

#[derive(FsdpUnit)]
struct Block {
    #[fsdp(shape = [4, 4])]
    weight: Param,
}

#[derive(FsdpUnit)]
struct Net {
    #[fsdp(rename = "model.layers")]
    layers: Vec<Unit<Block>>,
}

const _: () = assert!(StaticLayout::of(&Net::TREE, &StaticOptions::DEFAULT).numel() == 16);

fn main() {}
