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

/// Of so many runs a short suite has a third, and others `FSDP_MODEL_FACTOR` times as many.
pub fn share(runs: u64) -> u64 {
    std::env::var("FSDP_MODEL_FACTOR").map_or(runs.div_ceil(3), |factor| {
        runs * factor.parse::<u64>().expect("FSDP_MODEL_FACTOR is a number")
    })
}

/// The latest, the earliest, and a [share] of so many drawn schedules.
pub fn schedules(drawn: u64) -> impl Iterator<Item = Schedule> {
    Schedule::all(share(drawn))
}
