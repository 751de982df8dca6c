//! The expansion relies on no prelude.

#![no_implicit_prelude]

#[derive(::fsdp::FsdpUnit)]
#[fsdp(rename_all = "camelCase")]
pub struct Model {
    #[fsdp(frozen, tp = column, dtype = "f32", tie_with = "list", expert, no_decay, shape = [1])]
    pub weight: ::fsdp::Param,
    #[fsdp(init = normal(0.0, 0.5))]
    pub bias: ::fsdp::Param,
    pub list: ::std::vec::Vec<Sub>,
    pub option: ::core::option::Option<Sub>,
    pub label: ::std::string::String,
    pub eps: f64,
}

#[derive(::fsdp::FsdpUnit)]
pub struct Sub {
    pub weight: ::fsdp::Param,
}

#[derive(::fsdp::FsdpUnit)]
pub enum Choice {
    One(Sub),
    Two,
}

fn assert_module<M: ::fsdp::FsdpUnit>(_: &M) {}

pub(crate) fn main() {
    let model = Model {
        weight: ::fsdp::Param::new(1),
        bias: ::fsdp::Param::new(1),
        list: ::std::vec::Vec::new(),
        option: ::core::option::Option::None,
        label: ::std::string::String::new(),
        eps: 0.0,
    };
    assert_module(&model);
    assert_module(&Choice::Two);
    let _ = (model.eps, Choice::One(Sub { weight: ::fsdp::Param::new(1) }));
}
