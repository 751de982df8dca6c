//! Checkpoints of the whole training state. They are sharded on disk as the state is in memory. Tensors are found by name, not by
//! the rank that had them.
//!
//! # Format
//! A checkpoint is a directory:
//! - `index.json`: readable JSON. It has dtype, shape and place of every tensor, with checksums; small state by name, such as the
//!   optimizer's counters and a position in the data; and a description of the model. See [`Index`].
//! - `rank-00000.safetensors`, ..: the tensors that each rank owned, one flat piece of each. Any reader of safetensors opens
//!   them.
//!
//! Tensors are in sections. `model` has the buffers and the weights (the f32 main weights where there are any). `optimizer.exp_avg`
//! and so on have the optimizer's state. Other sections have averages of the weights. A tensor has the name of its parameter; a
//! tied parameter has its first name; a fused parameter is stored as its parts.
//!
//! Different models can have tensors of equal names and shapes: enums of other variants, tied and untied parameters, a buffer in
//! place of a parameter. So a checkpoint has a [`ModelDescription`], and a model with another one is refused.
//!
//! A restore reads ranges, so the number of ranks, the strategy, the mesh and the layout may all differ from those of the save. If
//! mesh, strategy and alignment of shards are equal, training continues bit for bit. Otherwise sums may have another order.
//!
//! The program `fsdp checkpoint`, of the crate `fsdp-cli`, shows checkpoints, verifies, compares and exports them.

mod agree;
mod background;
mod commit;
mod contents;
mod description;
mod disk;
mod expected;
mod finite;
mod fit;
mod full_state;
mod held;
mod index;
mod open_files;
mod read;
mod restore;
mod state;
mod store;
mod verify;
mod write;

pub use crate::error::CheckpointError;
pub use background::BackgroundSaver;
pub use contents::{Contents, MODEL};
pub use description::ModelDescription;
pub use index::{
    FORMAT_VERSION, INDEX_FILE, Index, Section, StoredDtype, StoredFile, StoredPart, StoredTensor, Writer,
};
pub use read::Checkpoint;
pub use restore::{Restore, Restored};
pub use state::{ModelRef, OptimizerState};
pub use store::{Checkpoints, Entry};
