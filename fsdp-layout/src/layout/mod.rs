//! Where every element of every parameter lives: groups, buckets, items and shards.
//!
//! Pure arithmetic over [`ParamSpec`](crate::spec::ParamSpec)s; nothing here allocates device memory. All
//! ranks compute the same layout from the same specs, so that no rank has to be asked where its elements are.
//!
//! - A **group** is the parameters of one [`GroupKey`](crate::spec::GroupKey).
//! - A **bucket** is one flat buffer: a group, or a part of one. It is cut evenly in as many **shards** as there are
//!   ranks; the shard is the input of the all-gather and the bucket its output.
//! - An **item** is a parameter's place in its bucket.
//!
//! [`ModelLayout`] is the layout of a model; [`StaticLayout`] has the same figures, computed from the model's
//! type by the compiler.
//!
//! All positions and lengths are in elements unless a name says bytes.

mod bucket;
mod error;
mod memory;
mod model;
mod row;
mod static_layout;

pub use bucket::{BucketLayout, Item, ItemShard, element_bucket_size};
pub use error::LayoutError;
pub use memory::{MemoryPlan, POOLED_UNITS, PoolLimit, Schedule};
pub use model::{LayoutOptions, ModelLayout, UnitLayout, UnitSpec};
pub use static_layout::{
    FitOptions, StaticBucket, StaticLayout, StaticOptions, StaticUnit, check_tp_field, check_tp_size,
    require_fit,
};

/// Start alignment of items under [`ShardAlignment::Element`], in bytes: a cache line, and the widest vector
/// register.
pub const ITEM_ALIGNMENT_BYTES: usize = 64;

const _: () = assert!(usize::BITS >= 64, "element counts need 64 bits");

/// Where shard boundaries may fall.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ShardAlignment {
    /// Anywhere. Every item starts at a multiple of 64 bytes and the total is padded to ranks × 64 bytes.
    #[default]
    Element,
    /// Between two rows (slices along dim 0) of an item, never inside one, so that each rank holds whole
    /// rows.
    Row,
}
