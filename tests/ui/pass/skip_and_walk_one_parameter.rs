//! One type parameter in a walked and in a skipped field, and one that is only skipped.

use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
pub struct Leaf {
    pub weight: Param,
}

#[derive(FsdpUnit)]
pub struct Both<T> {
    pub a: T,
    #[fsdp(skip)]
    pub b: Option<T>,
    pub weight: Param,
}

#[derive(FsdpUnit)]
pub struct OnlySkip<T> {
    #[fsdp(skip)]
    pub config: T,
    pub weight: Param,
}

pub struct NotAModule;

fn assert_module<T: FsdpUnit>(_: &T) {}

pub(crate) fn main() {
    let param = || Param::new(1);
    assert_module(&Both { a: Leaf { weight: param() }, b: None, weight: param() });
    assert_module(&OnlySkip { config: NotAModule, weight: param() });
}
