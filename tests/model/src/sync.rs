//! The names of `fsdp-comm/src/sync.rs`, under the checker: every lock, wait, message and join is a point
//! where it may run another thread.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use shuttle::rand::{Rng, thread_rng};

pub(crate) use shuttle::sync::atomic::{AtomicUsize, Ordering};
pub(crate) use shuttle::sync::mpsc;
pub(crate) use shuttle::thread_local;

/// A mutex with the interface of `parking_lot`.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

pub(crate) struct MutexGuard<'a, T> {
    mutex: &'a shuttle::sync::Mutex<T>,
    /// `None` only while a [`Condvar`] waits.
    guard: Option<shuttle::sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Mutex(shuttle::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard { mutex: &self.0, guard: Some(ignore_poison(self.0.lock())) }
    }
}

fn ignore_poison<T>(result: std::sync::LockResult<T>) -> T {
    result.unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.guard.as_ref().expect("locked")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.guard.as_mut().expect("locked")
    }
}

/// A condition variable with the interface of `parking_lot`'s, and two more freedoms for the checker: a wait
/// may wake for nothing, and one with a deadline may time out at any moment.
#[derive(Debug, Default)]
pub(crate) struct Condvar(shuttle::sync::Condvar);

pub(crate) struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    pub(crate) fn timed_out(&self) -> bool {
        self.0
    }
}

impl Condvar {
    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }

    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        if chance() {
            return relock(guard);
        }
        let inner = guard.guard.take().expect("locked");
        guard.guard = Some(ignore_poison(self.0.wait(inner)));
    }

    pub(crate) fn wait_until<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        _deadline: Instant,
    ) -> WaitTimeoutResult {
        if chance() {
            // Others may run, and make true what is waited for, before the lock is had again.
            relock(guard);
            return WaitTimeoutResult(true);
        }
        self.wait(guard);
        WaitTimeoutResult(false)
    }
}

/// True now and then, if the checker draws random numbers.
fn chance() -> bool {
    crate::check::draws() && thread_rng().gen_ratio(1, 16)
}

fn relock<T>(guard: &mut MutexGuard<'_, T>) {
    drop(guard.guard.take());
    guard.guard = Some(ignore_poison(guard.mutex.lock()));
}

/// A moment in a world without clocks: only whether there is a deadline matters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Instant;

impl Instant {
    pub(crate) fn now() -> Instant {
        Instant
    }

    /// `None` for a time-out without end.
    pub(crate) fn checked_add(self, timeout: Duration) -> Option<Instant> {
        (timeout != Duration::MAX).then_some(Instant)
    }
}

pub(crate) mod thread {
    pub(crate) use shuttle::thread::{JoinHandle, Scope, ScopedJoinHandle, current, scope};

    /// Names and stacks of threads are not the checker's.
    pub(crate) struct Builder(());

    impl Builder {
        pub(crate) fn new() -> Builder {
            Builder(())
        }

        pub(crate) fn name(self, _: String) -> Builder {
            self
        }

        pub(crate) fn stack_size(self, _: usize) -> Builder {
            self
        }

        pub(crate) fn spawn<T, F>(self, run: F) -> std::io::Result<JoinHandle<T>>
        where
            T: Send + 'static,
            F: FnOnce() -> T + Send + 'static,
        {
            Ok(shuttle::thread::spawn(publish(run)))
        }

        pub(crate) fn spawn_scoped<'scope, T, F>(
            self,
            scope: &'scope Scope<'scope, '_>,
            run: F,
        ) -> std::io::Result<ScopedJoinHandle<'scope, T>>
        where
            T: Send + 'scope,
            F: FnOnce() -> T + Send + 'scope,
        {
            Ok(scope.spawn(publish(run)))
        }
    }

    /// `run`, followed by a tick of the thread's clock: who joins it has seen all that it did.
    fn publish<T>(run: impl FnOnce() -> T) -> impl FnOnce() -> T {
        move || {
            let value = run();
            super::AtomicUsize::new(0).store(1, super::Ordering::Release);
            value
        }
    }
}
