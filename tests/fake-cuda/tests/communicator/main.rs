//! The communicator by NCCL, on the fake driver.

mod collectives;
mod groups;
mod world;
