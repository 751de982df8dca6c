//! Modules, units and the training-state machine.

mod agreement;
mod backward_step;
mod buffers;
mod collect;
mod config;
mod constant;
mod core;
mod ema;
mod forward;
mod fsdp;
mod full;
mod full_params;
mod fused;
mod gradients;
#[cfg(feature = "cuda")]
mod graph;
mod held;
mod history;
mod load;
mod loss_scale;
mod module;
mod optimizer;
mod owner_step;
mod param;
mod param_groups;
mod report;
mod scope;
mod settings;
mod sharding;
mod sink;
mod tokens;
mod turns;
mod unit;

pub(crate) use self::core::Engine;
pub(crate) use buffers::{buffer_dtype, buffer_list, overwrite_buffer, read_buffer};
pub use config::{FsdpConfig, GradientScaling, Recompute};
pub use constant::{assert_fits, check_tp_field, check_tp_size};
pub use ema::Ema;
pub use forward::{Forward, Tensors};
pub use fsdp::{Fsdp, NoSync, Unsharding};
pub use full_params::{Access, FullParam};
#[cfg(feature = "cuda")]
pub use graph::StepGraph;
pub(crate) use held::{Held, HeldState, StepCounts};
pub use loss_scale::Step;
pub use module::{Buffer, FsdpUnit, Fused, Shaped, Tie, Visitor, Walker};
pub use optimizer::ShardedOptimizer;
pub use owner_step::OwnerOptimizer;
pub use param::Param;
pub use param_groups::ParamGroups;
pub use report::{MemoryReport, TrafficReport, UnitReport};
pub use scope::Scope;
pub use sharding::FullyShard;
pub use sink::GradSink;
pub(crate) use turns::{Turn, Turns};
pub use unit::{Unit, UnitCell};
