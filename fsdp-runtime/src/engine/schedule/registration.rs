//! Memory of pools that communicators register.

use crate::comm::{CommError, Communicator, Registration};
use crate::device::Slice;
use crate::memory::Pool;

/// Moves the slots of a pool to memory that `comm` can register. Nothing is done where there are none.
///
/// # Errors
/// [`CommError::Invalid`] if their addresses are not stable or `comm` registers nothing; those of the allocation.
pub(super) fn settle(pool: &mut Pool, comm: &dyn Communicator) -> Result<(), CommError> {
    let refuse = |why: &str| {
        let message = format!("the buffers of a pool cannot be registered: {why}");
        Err(CommError::Invalid { rank: comm.rank(), message })
    };
    if pool.is_empty() {
        return Ok(());
    }
    if !pool.is_kept() {
        return refuse("without `double_buffer` they come and go, and their addresses with them");
    }
    match comm.registrable() {
        Some(memory) => pool.settle(memory),
        None => refuse("the ranks are not joined by NCCL, and other communicators register no memory"),
    }
}

/// Registers memory that stays with a communicator whose collectives work on it, all of whose ranks must call it.
///
/// # Errors
/// [`CommError::Invalid`] if the memory is not of those that `comm` registers; those of [`Communicator::register`].
pub(super) fn register(
    comm: &dyn Communicator,
    how: Registration,
    slices: Vec<Slice>,
) -> Result<(), CommError> {
    if slices.is_empty() { Ok(()) } else { comm.register(&slices, how) }
}
