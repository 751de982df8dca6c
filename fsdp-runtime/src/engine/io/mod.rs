//! Weights, gradients and buffers as they are read, written, and compared between copies.

pub(crate) mod buffers;
pub(crate) mod full_params;
pub(crate) mod load;
pub(crate) mod replicas;
pub(crate) mod whole;
