//! The communicator by NCCL, on the fake driver.

mod collectives;
mod failures;
mod groups;
mod world;
