#![forbid(unsafe_code)]

use fsdp::memory::{Account, Category};
use fsdp::spec::Dtype;
use fsdp_runtime::device::{HostMemory, Slice};

fn main() {
    let _ = Account::default().allocate(Category::GatherPool, Dtype::F32, (1 << 62) + 1);
    let _ = Slice::zeros(Dtype::F32, 4, None);
    let _ = Slice::zeros_in(&HostMemory, Dtype::F32, 4, None);
    let _ = Account::default().allocator(Category::GatherPool).allocate(Dtype::F32, 4);
}
