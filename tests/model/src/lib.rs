//! The runtime's concurrent modules, compiled from their own source files against primitives whose every step
//! a checker orders ([`sync`]), and memory that notices accesses which nothing orders ([`device`]).
//!
//! The crate stands apart from `fsdp-runtime`, so that the checker is no feature of it: cargo would switch the
//! feature on in every build of the workspace.

// The modules' own unit tests are for real threads: `cargo test --lib` finds nothing here.
#![cfg(not(test))]
// Of the modules taken over only a part is used here.
#![allow(dead_code, unused_imports)]

use fsdp_runtime::{layout, mesh, spec};

mod sync;

mod error;

use error::Result;

mod device;

#[path = "../../../fsdp-runtime/src/comm/mod.rs"]
mod comm;

#[path = "../../../fsdp-runtime/src/launch/mod.rs"]
mod launch;

mod memory;

#[path = "../../../fsdp-runtime/src/buffer.rs"]
mod buffer;

#[path = "../../../fsdp-runtime/src/trace.rs"]
mod trace;

#[path = "../../../fsdp-runtime/src/pipeline/mod.rs"]
mod pipeline;

mod check;

pub mod knots;
pub mod pipelines;
pub mod rendezvous;
pub mod streams;
