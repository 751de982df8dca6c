//! Training a Llama: the loop, and what surrounds it: options, metrics, curves, progress and tables.

mod checkpoints;
mod device;
mod files;
pub mod lanes;
pub mod metrics;
mod options;
pub mod plot;
pub mod progress;
pub mod quantity;
pub mod report;
pub mod table;
mod train;

pub use checkpoints::{CheckpointOptions, RunCheckpoints};
pub use device::TrainDevice;
pub use files::{Named, check_distinct};
pub use options::{TrainError, TrainOptions};
pub use train::{Outputs, TrainSummary, shard, train};
