use fsdp::layout::{StaticLayout, StaticOptions};
use fsdp::prelude::*;

#[derive(FsdpUnit)]
struct Head {
    weight: Param,
}

#[derive(FsdpUnit)]
struct Net {
    #[fsdp(rename = "model.head")]
    head: Unit<Head>,
}

const _: () = assert!(StaticLayout::of(&Net::TREE, &StaticOptions::DEFAULT).numel() == 16);

fn main() {}
