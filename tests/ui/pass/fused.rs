//! Fused parameters of every kind of field, in every spelling, beside every other word.

#![deny(warnings)]
#![allow(dead_code)]

use std::collections::BTreeMap;

use fsdp::{FsdpUnit, Param, Unit};

#[derive(FsdpUnit)]
#[fsdp(rename_all = "camelCase")]
struct Linear<const IN: usize, const OUT: usize> {
    #[fsdp(shape = [OUT, IN])]
    weight: Param,
    bias: Option<Param>,
}

#[derive(FsdpUnit)]
struct Layer<T> {
    #[fsdp(fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",), tp = column, frozen)]
    qkv: Unit<Linear<8, 16>>,
    #[fsdp(fused(r"gate", r#"up"#))]
    #[fsdp(shape = [2, 8], init = zeros, dtype = "bf16", no_decay, expert)]
    gate_up: Param,
    #[fsdp(r#fused("a", "b"))]
    many: Vec<Option<[Param; 2]>>,
    #[fsdp(fused("c", "d"))]
    generic: BTreeMap<String, T>,
}

#[derive(FsdpUnit)]
enum Mixer {
    Attention(#[fsdp(fused("q", "k"))] Param),
    Mlp {
        #[fsdp(fused("q", "k"))]
        r#type: Param,
    },
    Both(#[fsdp(fused("q", "k"))] Param, #[fsdp(fused("gate", "up"))] Param),
}

macro_rules! fuse {
    ($name:ident, $first:literal $(, $rest:literal)*) => {
        #[derive(FsdpUnit)]
        struct $name {
            #[fsdp(fused($first $(, $rest)*))]
            fused: Param,
        }
    };
}

fuse!(FromMacro, "x", "y", "z");

fn assert_module<M: FsdpUnit>() {}

pub(crate) fn main() {
    assert_module::<Layer<Mixer>>();
    assert_module::<FromMacro>();
}
