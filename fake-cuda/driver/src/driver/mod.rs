//! The exported functions of the CUDA driver.

mod alloc;
mod context;
mod copy;
mod device;
mod event;
mod graph;
mod launch;
mod missing;
mod module;
mod pool;
mod stream;

pub use context::{Context, current_context, end_contexts};
pub use event::Event;
pub use graph::{Graph, GraphExec};
pub use launch::Kernel;
pub use module::{Function, Module};
pub use pool::Pool;
pub use stream::find_stream;

pub use alloc::{allocate_on_device, check_host_access, free_now};

use crate::abi::{Outcome, Status};
use crate::state::{Held, lock};

/// Runs the body of an exported function under the lock.
fn call(body: impl FnOnce(&mut Held) -> Outcome) -> Status {
    body(&mut lock()).into()
}
