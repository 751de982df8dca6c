//! Structs and enums of every kind, empty ones too.

use std::sync::Arc;

use fsdp::{FsdpUnit, Param, Unit};

#[derive(FsdpUnit)]
pub struct Named {
    weight: Param,
}

#[derive(FsdpUnit)]
pub struct Braces {}

#[derive(FsdpUnit)]
pub struct Tuple(Param, pub(crate) Named, #[fsdp(skip)] *const u8, f32);

#[derive(FsdpUnit)]
pub struct NewType<T: ?Sized>(Box<T>);

#[derive(FsdpUnit)]
pub struct NoFields();

#[derive(FsdpUnit)]
pub struct UnitStruct;

#[derive(FsdpUnit)]
pub enum Ffn<T> {
    Dense { up: Param, down: Arc<Named> },
    Experts(Vec<Unit<Named>>, usize),
    Shared(T),
    Nested(Option<Box<Ffn<T>>>),
    Skipped(#[fsdp(skip)] *const u8),
    Empty(),
    Braces {},
    Identity,
}

#[derive(FsdpUnit)]
pub enum Never {}

fn assert_module<T: FsdpUnit>(_: &T) {}

pub(crate) fn main() {
    let named = || Named { weight: Param::new(1) };
    assert_module(&Braces {});
    assert_module(&Tuple(Param::new(1), named(), std::ptr::null(), 0.5));
    assert_module(&NewType::<[Named]>(Box::new([named()])));
    assert_module(&NoFields());
    assert_module(&UnitStruct);
    assert_module(&[
        Ffn::Dense { up: Param::new(1), down: Arc::new(named()) },
        Ffn::Experts(vec![Unit::new(named())], 1),
        Ffn::Shared(UnitStruct),
        Ffn::Nested(Some(Box::new(Ffn::Identity))),
        Ffn::Skipped(std::ptr::null()),
        Ffn::Empty(),
        Ffn::Braces {},
    ]);
    assert_module(&None::<Never>);
}
