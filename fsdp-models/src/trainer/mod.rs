//! What surrounds a training loop: metrics, curves, progress and tables.

pub mod metrics;
pub mod plot;
pub mod progress;
pub mod quantity;
pub mod table;
