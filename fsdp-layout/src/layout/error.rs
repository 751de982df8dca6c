//! Errors in the input of a layout.

use thiserror::Error;

/// Why a layout could not be made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// There must be someone to hold a shard.
    #[error("a layout needs at least 1 rank, got 0")]
    NoRanks,
    /// Unit 0 is the root and always there.
    #[error("a layout needs the root unit at index 0, got no units")]
    NoRoot,
    /// A parameter's key names a unit that was not given.
    #[error("parameter `{param}` is in unit {unit}, but there are {units} units")]
    UnknownUnit {
        /// Name of the parameter.
        param: String,
        /// The unit in its key.
        unit: usize,
        /// Number of units given.
        units: usize,
    },
    /// Names identify parameters in checkpoints and across ranks.
    #[error("two parameters are named `{param}`")]
    DuplicateName {
        /// The name.
        param: String,
    },
    /// The number of elements or bytes does not fit 63 bits.
    #[error("parameter `{param}` of shape {shape:?} makes a bucket of more than 2^63 bytes")]
    TooLarge {
        /// Name of the parameter.
        param: String,
        /// Its shape.
        shape: Vec<usize>,
    },
}
