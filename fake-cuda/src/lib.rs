//! Tests of CUDA code without a GPU: a CUDA driver and NCCL in host memory that find what a GPU would hide.
//!
//! A [`Session`] loads them in place of `libcuda` and `libnccl`, for everything in the process that loads those by name
//! (`cudarc` with `dynamic-loading`). Nothing runs before somebody waits for it ([`Schedule::Latest`]), so a wait that
//! was forgotten gives stale values every time; and whatever the schedule, two operations that touch the same bytes
//! without being ordered are a [`Finding`]. A session that ends with findings nobody took panics.
//!
//! ```
//! use fake_cuda::{Access, Schedule, Session};
//!
//! let session = Session::new(Schedule::Latest);
//! // `void doubled(const float* in, float* out, size_t n)`
//! session.kernel(
//!     "doubled",
//!     &[8, 8, 8],
//!     |launch| {
//!         let bytes = launch.param::<u64>(2) as usize * 4;
//!         vec![Access::read(launch.param(0), bytes), Access::write(launch.param(1), bytes)]
//!     },
//!     |launch| {
//!         let n = launch.param::<u64>(2) as usize;
//!         let doubled = launch.read::<f32>(launch.param(0), n).iter().map(|x| 2.0 * x).collect::<Vec<_>>();
//!         launch.write(launch.param(1), &doubled);
//!     },
//! );
//! // The code under test, by cudarc.
//! drop(session);
//! ```
//!
//! What holds on a device and does not here, and the other way round, is in the README beside this crate; its example
//! `forgotten_wait` is a whole program.

mod candle_kernels;
mod finding;
mod kernel;
#[path = "../driver/src/kernel_abi.rs"]
#[allow(missing_docs)]
mod kernel_abi;
mod library;
mod log;
mod mutation;
mod profile;
mod session;

pub use candle_kernels::register_candle_kernels;
pub use finding::{Finding, Kind};
pub use kernel::register as register_kernel;
pub use kernel::{Access, Launch};
pub use log::Operation;
pub use mutation::{LeftOut, Of, Step, Survivor, survivors};
pub use profile::{PROFILER, ranges};
pub use session::{Schedule, Session, Usage};
pub use session::{acquire, label, read_pinned, release, write_pinned};
