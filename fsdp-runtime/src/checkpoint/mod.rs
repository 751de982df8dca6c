//! Checkpoints: the whole training state, sharded on disk as it is in memory, keyed by what a tensor *is* rather than by
//! where it was.
//!
//! # Format
//! A checkpoint is a directory:
//! - `index.json`: readable; for every tensor its dtype, its shape and where its elements are, with checksums; small
//!   state (the optimizer's counters, a position in the data, ..) by name; what the model is beyond its tensors. See
//!   [`Index`].
//! - `rank-00000.safetensors`, ..: what each rank owned, one flat piece of each tensor; any reader of safetensors opens
//!   them.
//!
//! Tensors are in sections: `model` has the weights (the f32 main weights where there are any, else the model weights)
//! and the buffers, `optimizer.exp_avg` and so on the optimizer's state, other names averages of the weights. Their names
//! are those of the parameters; of a tied parameter its first one; of a fused parameter those of its parts.
//!
//! Enums of other variants, tied and untied parameters, a buffer and a parameter can have tensors of the same names and
//! shapes, and be other models: a checkpoint has a [`ModelDescription`], and is restored into a model of the same one.
//!
//! Loading reads ranges, so the number of ranks, the strategy, the mesh and the layout may all be other ones. On the same
//! mesh, with the same strategy and alignment of shards, training goes on bit for bit; else to the order of sums.
//!
//! The program `fsdp checkpoint`, of the crate `fsdp-cli`, shows checkpoints, verifies, compares and exports them.

mod agree;
mod background;
mod commit;
mod contents;
mod description;
mod disk;
mod error;
mod expected;
mod finite;
mod fit;
mod full_state;
mod index;
mod open_files;
mod read;
mod restore;
mod state;
mod store;
mod verify;
mod write;

pub use background::BackgroundSaver;
pub use contents::{Contents, MODEL};
pub use description::ModelDescription;
pub use error::CheckpointError;
pub use index::{
    FORMAT_VERSION, INDEX_FILE, Index, Section, StoredDtype, StoredFile, StoredPart, StoredTensor, Writer,
};
pub use read::Checkpoint;
pub use restore::{Restore, Restored};
pub use state::{ModelRef, OptimizerState};
pub use store::{Checkpoints, Entry};
