//! Aliases on a CUDA device: in a program that is built with the feature `cuda`, or none.

#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
mod present;

#[cfg(not(feature = "cuda"))]
pub(super) use absent::{alias, forget, tombstone};
#[cfg(feature = "cuda")]
pub(super) use present::{alias, forget, tombstone};
