//! The communicator by NCCL, on the fake driver.

mod buffers;
mod by_tcp;
mod collectives;
mod failures;
mod groups;
mod world;
