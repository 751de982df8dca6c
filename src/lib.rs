//! Fully sharded data parallel training for candle, made by the compiler.

// Lets the derive's absolute paths resolve inside this crate too.
extern crate self as fsdp;

pub use fsdp_derive::FsdpUnit;
pub use fsdp_runtime::comm::Accumulate;
pub use fsdp_runtime::{FsdpUnit, GradSink, Init, Param, Scope};

#[doc(hidden)]
pub use fsdp_runtime::__private;
