//! Weights, gradients and buffers as they are read, written, compared between copies, and held for checkpoints.

pub(crate) mod buffers;
pub(crate) mod full_params;
pub(crate) mod held;
pub(crate) mod load;
pub(crate) mod replicas;
pub(crate) mod turns;
pub(crate) mod whole;
