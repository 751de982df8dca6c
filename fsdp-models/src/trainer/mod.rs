//! Trains a Llama: the loop, and its options, metrics, curves, progress and tables.

mod checkpoints;
mod cuda;
mod device;
pub mod lanes;
pub mod metrics;
mod options;
pub mod plot;
pub mod progress;
pub mod quantity;
pub mod report;
mod stop;
pub mod table;
mod train;

pub use checkpoints::{CheckpointOptions, RunCheckpoints};
pub use device::TrainDevice;
pub use options::{TrainError, TrainOptions};
pub use stop::{INTERRUPTED, Stop};
pub use train::{Outputs, TrainSummary, shard, train};
