//! Programs without `unsafe` that try to break memory: each gets an error, or does no harm. Those that do not even compile
//! are in `tests/ui/fail/unsound`.
//!
//! Sanitizers run them too (`.ci/sanitizers`). What could end the process does it in one of its own.

#![forbid(unsafe_code)]

mod apart;
mod lies;
mod models;
mod reentrance;
mod sizes;
mod threads;
