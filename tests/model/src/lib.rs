//! The concurrent modules of `fsdp-comm` and the runtime, compiled from their own source files against primitives whose every step
//! a checker orders ([`sync`]), and memory that notices accesses which nothing orders ([`device`]).
//!
//! The crate stands apart from those, so that the checker is no feature of them: cargo would switch the
//! feature on in every build of the workspace.

// The modules' own unit tests are for real threads: `cargo test --lib` finds nothing here.
#![cfg(not(test))]
// Of the modules taken over only a part is used here.
#![allow(dead_code, unused_imports)]

use fsdp_runtime::{layout, mesh, spec};

mod sync;

#[path = "../../../fsdp-comm/src/error.rs"]
mod error;

use error::{Error, Result};

mod device;

#[path = "../../../fsdp-comm/src/comm/mod.rs"]
mod comm;

#[path = "../../../fsdp-comm/src/launch/mod.rs"]
mod launch;

mod memory;

#[path = "../../../fsdp-runtime/src/buffer.rs"]
mod buffer;

#[path = "../../../fsdp-comm/src/trace.rs"]
mod trace;

#[path = "../../../fsdp-runtime/src/engine/ids.rs"]
mod ids;

#[path = "../../../fsdp-runtime/src/engine/schedule/mod.rs"]
mod schedule;

mod check;

pub mod knots;
pub mod pipelines;
pub mod rendezvous;
pub mod streams;
