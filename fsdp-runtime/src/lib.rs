//! The runtime behind the `fsdp` crate: layouts, streams, collectives, memory, pipelines and the engine.
//!
//! Modules are layers, lowest first; each imports only from those above it in this list.

pub mod comm;
pub mod device;
pub mod engine;
pub mod init;
pub mod launch;
pub mod mesh;
pub mod spec;

pub use engine::{FsdpUnit, GradSink, Param, Scope};
pub use init::Init;

/// What the derive's expansion calls. Not for users: it may change in any release.
#[doc(hidden)]
pub mod __private {
    pub use crate::engine::{Attrs, Field, FsdpUnit, Walker};
    pub use crate::spec::{Dtype, TpPlacement};
}
