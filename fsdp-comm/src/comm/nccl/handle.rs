//! Owns an NCCL communicator.

use std::time::Duration;

use cudarc::nccl::sys::{self, ncclComm_t, ncclResult_t, ncclUniqueId};
use parking_lot::Mutex;

use super::library::{Failure, config, outcome};

/// A communicator of NCCL whose calls do not block; none once it has been destroyed or aborted.
///
/// The lock is held during a call, never between calls: it can be aborted while another thread waits for it to get ready.
pub(super) struct Handle(Mutex<Option<Raw>>);

struct Raw(ncclComm_t);

// SAFETY: NCCL's communicators have no thread affinity; the lock keeps calls apart.
unsafe impl Send for Raw {}

/// How a communicator is.
#[derive(Clone, Debug)]
pub(super) enum Health {
    /// Its last call is over.
    Ready,
    /// Its last call is under way.
    Busy,
    /// It has failed.
    Failed(Failure),
    /// It has been destroyed or aborted.
    Gone,
}

/// A new id, for all ranks of a communicator.
pub(super) fn unique_id() -> Result<ncclUniqueId, Failure> {
    let mut id = ncclUniqueId { internal: [0; 128] };
    // SAFETY: the call writes the id.
    let code = unsafe { sys::ncclGetUniqueId(&mut id) };
    outcome("ncclGetUniqueId", std::ptr::null_mut(), code).map(|()| id)
}

impl Handle {
    /// Begins to make rank `rank` of `size` of the communicator of this id, on the current context. All ranks have to.
    pub(super) fn init(id: ncclUniqueId, rank: usize, size: usize) -> Result<Handle, Failure> {
        let (mut comm, mut config) = (std::ptr::null_mut(), config());
        // SAFETY: the call writes the communicator before it returns, and does not keep the configuration.
        let code =
            unsafe { sys::ncclCommInitRankConfig(&mut comm, size as i32, id, rank as i32, &mut config) };
        outcome("ncclCommInitRankConfig", std::ptr::null_mut(), code)?;
        Ok(Handle(Mutex::new((!comm.is_null()).then_some(Raw(comm)))))
    }

    /// Calls `f` with the communicator, if it is still there.
    pub(super) fn with<R>(&self, f: impl FnOnce(ncclComm_t) -> R) -> Option<R> {
        self.0.lock().as_ref().map(|Raw(comm)| f(*comm))
    }

    pub(super) fn health(&self) -> Health {
        let health = self.with(|comm| {
            let mut code = ncclResult_t::ncclSuccess;
            // SAFETY: the communicator is alive under the lock; the call writes the code.
            let asked = unsafe { sys::ncclCommGetAsyncError(comm, &mut code) };
            match outcome("ncclCommGetAsyncError", comm, asked).and_then(|()| outcome("NCCL", comm, code)) {
                Err(failure) => Health::Failed(failure),
                Ok(()) if code == ncclResult_t::ncclInProgress => Health::Busy,
                Ok(()) => Health::Ready,
            }
        });
        health.unwrap_or(Health::Gone)
    }

    /// Begins its end: what was enqueued is done before it.
    pub(super) fn finalize(&self) -> Result<(), Failure> {
        let called = self.with(|comm| {
            // SAFETY: the communicator is alive under the lock.
            let code = unsafe { sys::ncclCommFinalize(comm) };
            outcome("ncclCommFinalize", comm, code)
        });
        called.unwrap_or(Ok(()))
    }

    /// Its end, once it has been finalized.
    pub(super) fn destroy(&self) -> Result<(), Failure> {
        let Some(Raw(comm)) = self.0.lock().take() else { return Ok(()) };
        // SAFETY: the communicator was alive, and nobody else has it any more.
        let code = unsafe { sys::ncclCommDestroy(comm) };
        outcome("ncclCommDestroy", std::ptr::null_mut(), code)
    }

    /// Its end without the other ranks. False if a call does not come back: then it must be tried again.
    pub(super) fn abort(&self) -> bool {
        const PATIENCE: Duration = Duration::from_millis(500);
        let Some(mut guard) = self.0.try_lock_for(PATIENCE) else { return false };
        let taken = guard.take();
        // The call comes back only when no graph holds the communicator: meanwhile others see that it is gone.
        drop(guard);
        if let Some(Raw(comm)) = taken {
            // SAFETY: the communicator was alive, and nobody else has it any more. There is nothing to be done should it
            // fail: the device is given up.
            let _ = unsafe { sys::ncclCommAbort(comm) };
        }
        true
    }
}
