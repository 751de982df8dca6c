//! Behaviour of the engine through the public API, on small models with known gradients.

mod accumulation;
mod aliasing;
mod boundary;
mod boundary_values;
mod clipping;
mod declarations;
mod dropout;
mod event_order;
mod failures;
mod fixtures;
mod frozen_and_unused;
mod full_params;
mod grad_accumulation;
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
