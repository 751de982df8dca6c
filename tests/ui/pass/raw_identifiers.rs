//! Keywords as names.

#![allow(non_camel_case_types)]

use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
pub struct r#try<r#dyn> {
    pub r#type: Param,
    pub r#match: r#dyn,
    pub r#normal: Param,
    pub r#mod: Inner,
}

#[derive(FsdpUnit)]
pub struct Inner {
    pub r#fn: Param,
}

#[derive(FsdpUnit)]
pub enum r#enum {
    r#if { r#else: Param },
    r#loop(Param),
}

fn assert_module<M: FsdpUnit>(_: &M) {}

pub(crate) fn main() {
    let param = || Param::new(1);
    let model =
        r#try { r#type: param(), r#match: param(), normal: param(), r#mod: Inner { r#fn: param() } };
    let choices = [r#enum::r#if { r#else: param() }, r#enum::r#loop(param())];
    assert_module(&model);
    assert_module(&choices);
}
