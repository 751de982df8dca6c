//! What tests of fsdp's CUDA code need of the fake driver beyond [`fake_cuda`]: the kernels of `fsdp-kernels`.

mod kernels;

use std::sync::Once;

use fake_cuda::{Schedule, Session};

pub use kernels::register_fsdp_kernels;

/// A session with the kernels of candle and of `fsdp-kernels` registered: what candle's CUDA tensors and the engine on them
/// need.
pub fn session(schedule: Schedule) -> Session {
    static REGISTERED: Once = Once::new();
    let session = Session::with_candle_kernels(schedule);
    REGISTERED.call_once(|| {
        register_fsdp_kernels();
    });
    session
}
