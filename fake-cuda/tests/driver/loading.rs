//! The fake is what cudarc loads, and only programs that ask for it get it.

use cudarc::driver::CudaContext;
use fake_cuda::{Schedule, Session};

#[test]
fn cudarc_loads_the_fake_under_both_names() {
    let session = Session::new(Schedule::Latest);
    let context = CudaContext::new(3).expect("a context");
    assert_eq!(context.name().expect("a name"), "Fake CUDA device 3");
    assert_eq!(cudarc::nccl::result::get_nccl_version().expect("a version"), 23_007);
    assert_eq!(CudaContext::device_count().expect("a count"), 8);
    drop(context);
    drop(session);
}
