//! Initial values from a counter-based generator keyed by (seed, parameter name, element index).

/// Initial value of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum Init {
    /// All elements the same.
    Constant(f32),
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// Normal distribution.
    Normal {
        /// Mean.
        mean: f32,
        /// Standard deviation.
        std: f32,
    },
    /// Uniform in `[low, high)`.
    Uniform {
        /// Smallest value.
        low: f32,
        /// Upper bound, excluded.
        high: f32,
    },
}
