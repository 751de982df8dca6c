//! Synchronisation: the locks, channels and threads of all code in which ranks and streams meet.
//!
//! `tests/model` compiles the modules that use this one against another of the same names, in which a checker
//! decides at every lock, wait and message which thread runs next.

pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
pub(crate) use std::sync::mpsc;
pub(crate) use std::thread;
pub(crate) use std::thread_local;
pub(crate) use std::time::Instant;

pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
