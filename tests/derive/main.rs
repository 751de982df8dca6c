//! What the derive writes: the walk over a model, its compile-time layout, and no warnings.

pub mod lints;
mod static_layout;
mod walk;
