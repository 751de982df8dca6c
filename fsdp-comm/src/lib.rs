//! How ranks work and talk: streams, events and memory of devices, communicators, and the launch of ranks.
//!
//! Above `fsdp-layout` and below the engine. Nothing here knows of a unit or of a tensor library.
//!
//! Modules are layers, lowest first; each imports only from those above it in this list.

#![warn(missing_debug_implementations)]

pub mod sync;

mod error;

pub mod device;

pub mod comm;

pub mod launch;

pub mod trace;

// Their types are in the signatures here.
pub use fsdp_layout::{mesh, spec};

pub use error::{Error, Result};
