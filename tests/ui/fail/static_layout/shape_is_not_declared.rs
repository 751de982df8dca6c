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

const NUMEL: usize = StaticLayout::of::<Net>(&StaticOptions::DEFAULT).numel();

fn main() {
    println!("{NUMEL}");
}
