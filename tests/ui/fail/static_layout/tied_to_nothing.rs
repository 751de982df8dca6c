use fsdp::layout::{StaticLayout, StaticOptions};
use fsdp::prelude::*;

#[derive(FsdpUnit)]
struct Linear {
    #[fsdp(shape = [10, 4])]
    weight: Param,
}

#[derive(FsdpUnit)]
struct Decoder {
    embed: Linear,
    #[fsdp(tie_with = "embedding")]
    head: Linear,
}

#[derive(FsdpUnit)]
struct Net {
    decoder: Decoder,
}

const _: () = assert!(StaticLayout::of(&Net::TREE, &StaticOptions::DEFAULT).numel() == 40);

fn main() {}
