//! The runtime's accounts and pools.

pub(crate) use fsdp_runtime::memory::{Account, Category};

#[path = "../../../../fsdp-runtime/src/memory/pool.rs"]
mod pool;

pub(crate) use pool::{Lease, Pool};
