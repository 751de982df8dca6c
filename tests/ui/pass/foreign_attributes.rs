//! Attributes of others, and doc comments in every form.

use fsdp::{FsdpUnit, Param};

/// plain `docs` with "quotes" and {braces} and \u{1F600}
#[doc = concat!("built ", "doc")]
#[doc = include_str!("foreign_attributes.rs")]
#[doc(alias = "x", hidden)]
#[derive(FsdpUnit)]
#[repr(C)]
#[non_exhaustive]
pub struct Model {
    /** block */
    #[doc = concat!("f", "ield")]
    pub a: Param,
    #[doc(hidden)]
    #[fsdp(frozen)]
    #[allow(dead_code)]
    pub b: Param,
    #[rustfmt::skip]
    pub c: Param,
}

pub(crate) fn main() {
    fn assert_module<T: FsdpUnit>() {}
    assert_module::<Model>();
}
