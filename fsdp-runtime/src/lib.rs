//! The runtime behind the `fsdp` crate: storage aliases, pipelines, the engine, optimizers and checkpoints. candle begins
//! here.
//!
//! Modules are layers, lowest first; each imports only from those above it in this list. The layers below them are crates:
//! `fsdp-layout` and `fsdp-comm`, whose modules are here under the names that users know.

#![warn(missing_debug_implementations)]

/// What a parameter is, and the policies by which it is trained.
pub mod spec {
    pub use fsdp_layout::policy::*;
    pub use fsdp_layout::spec::*;
}

pub use fsdp_layout::{init, layout, mesh, warning};

use fsdp_comm::sync;
pub use fsdp_comm::{comm, launch, trace};

pub mod files;

pub mod random;

pub mod optim;

mod error;

pub mod device;

pub mod memory;

pub mod buffer;

pub mod engine;

pub mod checkpoint;

pub use device::OnDevice;
pub use engine::{
    Ema, Forward, Fsdp, FsdpConfig, FsdpUnit, FullyShard, GradSink, GradientScaling, NonFinite,
    OwnerOptimizer, Param, Recompute, Scope, ShardedOptimizer, Tensors, Unit,
};
pub use error::{Error, Result};
pub use init::Init;
pub use spec::MixedPrecision;

/// What the derive's expansion calls. Not for users: it may change in any release.
#[doc(hidden)]
pub mod __private {
    pub use core::option::Option::Some;
    pub use core::stringify;

    pub use crate::Init;
    pub use crate::engine::{Buffer, FsdpUnit, Shaped, Walker, assert_fits, check_tp_field, check_tp_size};
    pub use crate::layout::FitOptions;
    pub use crate::spec::{Attrs, Dtype, Field, TpPlacement, Tree};
}
