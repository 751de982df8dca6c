//! The ops on CUDA devices: [`table`] lists them, `present` has what each does there (feature `cuda`), and `absent` what stands for
//! that in a program which is built without it.

#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
mod present;
pub(super) mod table;

#[cfg(not(feature = "cuda"))]
pub(super) use absent::{BUILT, ids_beside, is_captured, same_stream};
#[cfg(feature = "cuda")]
pub(super) use present::{BUILT, ids_beside, is_captured, same_stream};
