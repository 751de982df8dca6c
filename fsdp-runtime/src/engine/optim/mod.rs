//! Optimizers over the shards of a model: element by element, by owners of whole parameters, or inside the backward; and what is
//! done with gradients before.

pub(crate) mod ema;
pub(crate) mod grad_norm;
pub(crate) mod groups;
pub(crate) mod in_backward;
pub(crate) mod loss_scale;
pub(crate) mod owner;
pub(crate) mod sharded;
pub(crate) mod tokens;
