//! Modules, units, and the engine that trains them.
//!
//! # One training step, as one rank takes it
//!
//! Each line names who does it; the folder is behind it. `Step` is what changes, behind one lock that public calls and the
//! ends of units take for a moment; `Ctx` is what never changes.
//!
//! ```text
//! loss = model.forward(&batch)                          Fsdp::run                            api/fsdp.rs
//!   the root's weights are made whole                   Engine::begin_forward                core.rs
//!   for each unit that the user's module calls          Unit::forward                        unit/mod.rs
//!     weights are made whole                            weights::enter                       unit/weights.rs
//!       gathered, if they are not here yet              AllGatherPipeline::acquire           schedule/all_gather.rs
//!       with those of the units that come next            ::prefetch
//!       given to the parameters' tensors                Aliases::install                     memory/alias
//!     the user's module runs on a detached input        Run::graph                           unit/boundary.rs
//!     weights are taken back, a backward is expected    Engine::end_unit_forward             unit/gradients.rs
//!       and stay until another unit needs the room      AllGatherPipeline::release
//!     one op stands for the unit in the outer graph     Boundary
//!   the root stays whole for the backward               Engine::end_forward                  core.rs
//!
//! model.backward(&loss)                                 joined::run_backward                 api/joined.rs
//!   the root's gradients have a place                   Engine::begin_backward               core.rs
//!   candle walks the outer graph; at each unit          Boundary::bwd                        unit/boundary.rs
//!     weights are made whole, those before come next    Engine::begin_unit_backward          unit/gradients.rs
//!     the module runs again, if it is to                Run::recompute                       unit/boundary.rs
//!     its gradients have a place in a bucket            gradients::open                      unit/gradients.rs
//!       where there is room for them                    GradReducePipeline::open             schedule/grad_reduce.rs
//!     candle walks the inner graph: gradients come
//!       from ops that write them                        GradSink::accumulate_f32             memory/sink.rs
//!       from candle                                     gradients::collect
//!     weights are taken back                            Engine::end_unit_backward
//!     the last backward of the unit closes its sinks    gradients::close
//!       a unit that was reduced before is stepped       gradients::step_reduced              with `step_in_backward`
//!       and its buckets are reduced, if due             GradReducePipeline::reduce           schedule/grad_reduce.rs
//!   parts of the root are reduced where they complete   root_parts                           unit/root_parts.rs
//!   what is left is reduced                             Engine::end_backward                 core.rs
//!
//! optimizer.step(&mut model)                            ShardedOptimizer::step               optim/sharded.rs
//!   all reductions are over, nothing is gathered        gradients::finish                    unit/gradients.rs
//!   the rule updates this rank's part of each bucket    ShardedOptimizer::update
//!   new weights are installed, the next step begins     DueStep::finish, Step::finish        step.rs
//! ```
//!
//! Whatever goes wrong on the way, [`Fsdp::reset_step`] is `Step::abort`: sinks are closed, units sharded, gradients forgotten.
//!
//! # Where things are
//!
//! `ids` numbers of units, buckets and parameters; `ctx` and `step` what never changes and what does; `core` the calls that lock
//! the step; `unit` one unit: boundary, weights, gradients; `schedule` what is gathered and reduced, and when; `optim`
//! optimizers; `cuda` steps as graphs; `build` from a model to a sharded one; `io` weights in and out; `api` what programs see.

mod api;
mod build;
mod core;
mod ctx;
mod cuda;
mod ids;
mod io;
mod optim;
mod schedule;
mod step;
mod unit;

pub(crate) use self::core::Engine;
pub use api::config::{FsdpConfig, GradientScaling, NonFinite, Recompute};
pub use api::forward::{Forward, Tensors};
pub use api::fsdp::{Fsdp, NoSync, Unsharding};
pub use api::joined::Joined;
pub use api::param::Param;
pub use api::report::{MemoryReport, TrafficReport, UnitReport};
pub use api::scope::Scope;
pub use build::FullyShard;
pub use build::constant::{assert_fits, check_tp_field, check_tp_size};
pub use build::module::{Buffer, FsdpUnit, Fused, Shaped, Tie, Visitor, Walker};
pub(crate) use build::variants::live_variants;
pub(crate) use ctx::Ctx;
#[allow(unused_imports, reason = "empty without the feature `cuda`")]
pub use cuda::*;
pub(crate) use ids::{BucketId, Id, ParamId, Table, UnitId};
pub(crate) use io::buffers::buffer_list;
pub use io::full_params::FullParam;
pub(crate) use io::load::{Stores, fill_weights};
pub use optim::ema::Ema;
pub use optim::groups::ParamGroups;
pub use optim::loss_scale::ModelOptimizer;
pub use optim::owner::OwnerOptimizer;
pub use optim::sharded::ShardedOptimizer;
pub(crate) use optim::sharded::StepCounts;
pub(crate) use step::{Locked, Step};
pub use unit::{Unit, UnitCell};

pub use crate::memory::sink::GradSink;
