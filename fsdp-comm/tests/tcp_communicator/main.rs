//! Ranks that are joined by TCP.

mod collectives;
mod failures;
mod processes;
mod strangers;
mod world;
