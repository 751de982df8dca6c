//! The user's own items may bear any name.

#![allow(dead_code, non_camel_case_types)]

mod shadows {
    pub struct Option<T>(pub T);
    pub struct Result;
    pub struct Vec;
    pub struct Some;
    pub struct None;
    pub struct Box;
    pub trait Into {}
    pub mod core {}
    pub mod std {}
    pub mod fsdp {}
    pub struct Field;
    pub struct Walker;
    pub struct Attrs;
    pub struct Dtype;
    pub struct TpPlacement;
    pub type usize = u8;
}
#[allow(unused_imports)]
use self::shadows::*;

#[derive(::fsdp::FsdpUnit)]
struct String {
    weight: ::fsdp::Param,
}

#[derive(::fsdp::FsdpUnit)]
struct Mutex {
    weight: ::fsdp::Param,
}

#[derive(::fsdp::FsdpUnit)]
struct Model {
    #[fsdp(frozen, tp = row, dtype = "f16")]
    weight: ::fsdp::Param,
    // A path says that this is not the standard one.
    string: self::String,
    mutex: super::shadowed_names::Mutex,
    #[fsdp(skip)]
    skipped: (Option<u8>, Field, Walker, Attrs),
}

pub(crate) fn main() {
    fn assert_module<T: ::fsdp::FsdpUnit>() {}
    assert_module::<Model>();
}
