//! Behaviour of the engine through the public API, on small models with known gradients.

mod accumulation;
mod aliasing;
mod boundary;
mod clipping;
mod declarations;
mod failures;
mod faults_layout;
mod faults_optimizer;
mod faults_start;
mod fixtures;
mod frozen_and_unused;
mod full_params;
mod hangs;
mod hsdp;
mod layout_and_padding;
mod memory;
mod mixed_precision;
mod optimizer_state;
mod overlap;
mod recompute;
mod resharding;
mod scaling;
mod shaken;
mod tied;
