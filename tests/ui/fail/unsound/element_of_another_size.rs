#![forbid(unsafe_code)]

use fsdp::spec::Dtype;
use fsdp_runtime::device::Element;

#[derive(Clone, Copy)]
struct Two([f32; 2]);

impl Element for Two {
    const DTYPE: Dtype = Dtype::F32;
}

fn main() {}
