//! A CUDA driver, NCCL and what candle links beside them, in host memory: one shared library that is loaded or linked
//! under all their names.
//!
//! Nothing runs when it is submitted: a stream is a queue of deferred operations, an event is a position in one, and
//! a queue advances when the host or another stream waits for it, or as early as it may, or by a seed
//! ([`scheduler`]). Each operation says which memory it reads and writes, so two that touch the same bytes without
//! one being ordered before the other are found whatever the schedule was ([`race`]).
//!
//! `driver`, `nccl`, `blas`, `rand`, `nvrtc` and `runtime` are the exported functions; `control` is what tests call; the
//! rest is one state under one lock.

mod abi;
mod blas;
mod capture;
mod clock;
mod control;
mod driver;
mod heap;
mod host_functions;
mod kernel_abi;
mod log;
mod mutation;
mod names;
mod nccl;
mod nvrtc;
mod profiler;
mod queue;
mod race;
mod rand;
mod report;
mod runtime;
mod scheduler;
mod state;
mod upload;
