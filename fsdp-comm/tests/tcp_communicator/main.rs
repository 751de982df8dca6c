//! Ranks that are joined by TCP.

mod collectives;
mod failures;
mod processes;
#[cfg(target_os = "linux")]
mod shared_memory;
#[cfg(target_os = "linux")]
#[path = "../local_communicator/collectives.rs"]
mod shared_memory_collectives;
#[cfg(target_os = "linux")]
#[path = "../local_communicator/slices.rs"]
mod slices;
mod strangers;
mod world;

#[cfg(target_os = "linux")]
use {
    shared_memory::local,
    slices::{slice, tag, values},
};

/// Tests of ranks in threads: here a list, which `shared_memory` goes through on ranks in processes.
#[cfg(target_os = "linux")]
macro_rules! on_ranks {
    ($($name:ident,)*) => {
        pub const TESTS: &[(&str, fn())] = &[$((stringify!($name), $name)),*];
    };
}
#[cfg(target_os = "linux")]
use on_ranks;
