//! Streams of the CPU: in-order worker threads.
