//! Fields may bear the names of what the expansion, or any derive, declares; and so may what is around them.

#![allow(dead_code, non_camel_case_types, non_upper_case_globals)]

use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
pub struct Model {
    pub this: Param,
    pub layout: Param,
    pub offset: Param,
    pub params: Param,
    pub mesh: Param,
    pub f: Param,
    pub visitor: Param,
    pub path: Param,
    pub prefix: Param,
    pub name: Param,
    pub out: Param,
    pub result: Param,
    pub i: Param,
    pub len: Param,
    pub shape: Param,
    pub dtype: Param,
    pub unit: Param,
    pub field: Param,
    pub value: Param,
    pub buf: Param,
    pub index: Param,
    pub _0: Param,
    pub __self: Param,
    pub walk: Param,
    pub walker: Param,
    pub __walker: Param,
    pub field0: Param,
    pub __field0: Param,
    pub fields: Param,
    pub attrs: Param,
    pub tree: Param,
    pub visit: Param,
}

/// Constants and tuple structs share the scope of local bindings.
mod constants {
    pub const walk: usize = 1;
    pub const walker: usize = 1;
    pub static field0: usize = 1;
    pub struct field1;
}
use constants::*;

#[derive(FsdpUnit)]
pub struct visit(Param, [Param; walker]);

#[derive(FsdpUnit)]
pub enum field2 {
    A(Param, Param),
    B { field0: Param, walker: Param },
}

fn assert_module<T: FsdpUnit>() {}

pub(crate) fn main() {
    assert_module::<Model>();
    assert_module::<visit>();
    assert_module::<field2>();
}
