//! candle's kernels as Rust functions, by the names and with the parameters that they have in `candle-kernels`.
//!
//! Of the dtypes those that are trained with: f32, f64, bf16, f16, and u8, u32, i64 where candle has them. Not there
//! are fp8, quantized matrices, convolutions, images and what only candle-nn launches: to look one up is a finding that
//! names it.
//!
//! Floats are computed in f64 and rounded once, so a result may differ from a GPU's in the last places.

mod element;
mod elementwise;
mod fill;
mod indexing;
mod operand;
mod reduce;
mod rows;
mod unary;

/// Registers them, for this and later sessions.
pub fn register_candle_kernels() {
    unary::register();
    elementwise::register();
    fill::register();
    reduce::register();
    indexing::register();
    rows::register();
}

/// Calls `$f::<T>()` for each dtype of a list.
macro_rules! for_dtypes {
    (floats $f:ident) => {{
        $f::<f32>();
        $f::<f64>();
        $f::<half::bf16>();
        $f::<half::f16>();
    }};
    (all $f:ident) => {{
        for_dtypes!(floats $f);
        $f::<u8>();
        $f::<u32>();
        $f::<i64>();
    }};
}
use for_dtypes;
