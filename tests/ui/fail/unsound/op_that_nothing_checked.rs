#![forbid(unsafe_code)]

use fsdp_runtime::device::{Elementwise, Slice, Stream};

fn swap_with_itself(stream: &dyn Stream, slice: &Slice) {
    let _ = stream.elementwise(Elementwise::Swap(slice.clone(), slice.clone()));
}

fn main() {}
