//! What the engine does on CUDA devices only: steps as graphs.

#[cfg(feature = "cuda")]
mod graph;

#[cfg(feature = "cuda")]
pub use graph::StepGraph;
