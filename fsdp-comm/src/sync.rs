//! Synchronisation: the locks, channels and threads of all code in which ranks and streams meet.
//!
//! `tests/model` compiles the modules that use this one against another of the same names, in which a checker
//! decides at every lock, wait and message which thread runs next.

pub use std::sync::atomic::{AtomicUsize, Ordering};
pub use std::sync::mpsc;
pub use std::thread;
pub use std::thread_local;
pub use std::time::Instant;

pub use parking_lot::{Condvar, Mutex, MutexGuard};
