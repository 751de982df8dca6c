//! The runtime's accounts and pools; swapping tensors' storage is no part of what is checked.

#[path = "../../../fsdp-runtime/src/memory/account.rs"]
mod account;
#[path = "../../../fsdp-runtime/src/memory/pool.rs"]
mod pool;

pub use account::{Account, Category, Usage};
pub(crate) use pool::{Lease, Pool};

/// Stands for the tensors of a unit.
#[derive(Default)]
pub(crate) struct Aliases {}
