//! The runtime's accounts and pools.

pub(crate) use fsdp_runtime::memory::{Account, Category};

#[path = "../../../../fsdp-runtime/src/memory/pool.rs"]
mod pool;

pub(crate) use pool::{Lease, Pool};

/// Stands for the tensors of a unit.
#[derive(Default)]
pub(crate) struct Aliases {}
