//! Modules, units and the training-state machine.

mod buffers;
mod collect;
mod config;
mod constant;
mod core;
mod forward;
mod fsdp;
mod full;
mod full_params;
mod history;
mod module;
mod optimizer;
mod param;
mod report;
mod scope;
mod sharding;
mod sink;
mod tokens;
mod unit;

pub use config::{FsdpConfig, GradientScaling, Recompute};
pub use constant::{assert_fits, check_tp_size};
pub use forward::{Forward, Tensors};
pub use fsdp::{Fsdp, NoSync, Unsharding};
pub use full_params::{Access, FullParam};
pub use module::{Buffer, FsdpUnit, Shaped, Tie, Visitor, Walker};
pub use optimizer::ShardedOptimizer;
pub use param::Param;
pub use report::{MemoryReport, TrafficReport, UnitReport};
pub use scope::Scope;
pub use sharding::FullyShard;
pub use sink::GradSink;
pub use unit::{Unit, UnitCell};
