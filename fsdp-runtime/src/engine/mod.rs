//! Modules, units and the training-state machine.

mod backward_step;
mod collect;
mod config;
mod core;
mod ema;
mod forward;
mod fsdp;
mod full;
mod loss_scale;
mod module;
mod optimizer;
mod owner_step;
mod param;
mod param_groups;
mod report;
mod scope;
mod sharding;
mod sink;
mod unit;

pub use config::{FsdpConfig, GradientScaling, Recompute};
pub use ema::Ema;
pub use forward::{Forward, Tensors};
pub use fsdp::{Fsdp, NoSync};
pub use loss_scale::Step;
pub use module::{Buffer, FsdpUnit, Shaped, Tie, Visitor, Walker};
pub use optimizer::ShardedOptimizer;
pub use owner_step::OwnerOptimizer;
pub use param::Param;
pub use param_groups::ParamGroups;
pub use report::{MemoryReport, TrafficReport, UnitReport};
pub use scope::Scope;
pub use sharding::FullyShard;
pub use sink::GradSink;
pub use unit::{Unit, UnitCell};
