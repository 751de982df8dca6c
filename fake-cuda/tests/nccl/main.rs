//! NCCL among threads, called as cudarc exposes it.

mod collectives;
mod communicators;
mod failures;
mod groups;
mod order;
mod pipeline;
mod world;
