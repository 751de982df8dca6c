//! Behaviour of the engine through the public API, on small models with known gradients.

mod accumulation;
mod aliasing;
mod boundary;
mod clipping;
mod declarations;
mod dropout;
mod failures;
mod fixtures;
mod frozen_and_unused;
mod full_params;
mod hsdp;
mod layout_and_padding;
mod memory;
mod mixed_precision;
mod optimizer_state;
mod overlap;
mod recompute;
mod reference;
mod resharding;
mod scaling;
mod tied;
mod training_parity;
