use fsdp::layout::{StaticLayout, StaticOptions};
use fsdp::prelude::*;

#[derive(FsdpUnit)]
struct Linear {
    #[fsdp(shape = [10, 4])]
    weight: Param,
}

#[derive(FsdpUnit)]
struct Net {
    #[fsdp(tp = dim(2))]
    linear: Linear,
}

const _: () = assert!(StaticLayout::of(&Net::TREE, &StaticOptions::DEFAULT).numel() == 40);

fn main() {}
