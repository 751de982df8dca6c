//! Streams, events and flat device memory.
//!
//! A *stream* runs work in the order of submission, beside the host thread and the other streams; an *event*
//! is a point in a stream that others can wait for. The pipelines speak only these traits. On the CPU
//! ([`cpu`]) a side stream is a worker thread and the compute stream is the rank's own thread; on CUDA they
//! are streams of the driver.

mod activity;
mod anywhere;
mod average;
mod backend;
mod buffer;
mod clock;
pub mod cpu;
pub mod cuda;
mod elementwise;
mod memory;
mod pieces;
mod stream;
mod widen;

pub(crate) use activity::Activity;
pub use anywhere::{read_anywhere, update_all_anywhere, update_anywhere};
pub use average::move_average;
pub use backend::{Backend, CpuBackend};
pub use buffer::{ALIGN, Buffer, Element, OnFree, Slice};
pub use clock::now;
pub(crate) use cuda::HostRange;
pub use elementwise::{Accumulate, Elementwise, Fill, Op, cast, fill, move_towards, scale, swap};
pub use memory::{Block, HostMemory, Memory};
pub use stream::{DeviceStream, Event, Mark, Stream, Work};
pub use widen::{read_f32, update_f32};
