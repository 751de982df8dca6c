//! What a program sees: the sharded model, its configuration, and what modules are made of.

pub(crate) mod config;
pub(crate) mod controls;
pub(crate) mod forward;
pub(crate) mod fsdp;
pub(crate) mod joined;
pub(crate) mod mean;
pub(crate) mod param;
pub(crate) mod report;
pub(crate) mod scope;
pub(crate) mod unitless;
