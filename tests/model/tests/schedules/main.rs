//! The local communicator, the streams and the pipelines under thousands of schedules.

mod pipelines;
mod rendezvous;
mod streams;
