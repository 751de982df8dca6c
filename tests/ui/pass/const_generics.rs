//! Const parameters of every kind, with defaults, and arrays of modules.

use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
pub struct Linear<const IN: usize, const OUT: usize = 4> {
    weight: Param,
    bias: Param,
}

#[derive(FsdpUnit)]
pub struct Stack<const N: usize, T = Linear<2>>
where
    T: FsdpUnit,
{
    layers: [T; N],
}

#[derive(FsdpUnit)]
pub struct Flag<const ON: bool = { 1 + 1 == 2 }, const C: char = 'x', const SIGNED: i8 = -1> {
    weight: Param,
}

fn assert_module<T: FsdpUnit>(_: &T) {}

pub(crate) fn main() {
    let linear = || Linear::<2> { weight: Param::new((4, 2)), bias: Param::new(4) };
    let stack: Stack<2> = Stack { layers: [linear(), linear()] };
    assert_module(&stack);
    let flag: Flag = Flag { weight: Param::new(1) };
    assert_module(&flag);
}
