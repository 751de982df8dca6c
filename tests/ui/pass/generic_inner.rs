//! Type parameters that are modules are bound, phantom ones are not; one inside another module's type needs no bound of its
//! own where it has one already.

use std::marker::PhantomData;

use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
pub struct Leaf {
    pub weight: Param,
}

#[derive(FsdpUnit)]
pub struct Outer<B, M> {
    inner: M,
    head: Param,
    _phantom: PhantomData<B>,
}

#[derive(FsdpUnit)]
pub struct Deep<B, M: FsdpUnit, N>
where
    N: FsdpUnit,
{
    a: Outer<B, M>,
    b: Vec<N>,
}

#[derive(FsdpUnit)]
#[fsdp(bound = "M: FsdpUnit")]
pub struct Wrapped<M> {
    outer: Outer<u8, M>,
}

pub trait Family {
    type Block;
}

#[derive(FsdpUnit)]
pub struct Stack<F: Family> {
    blocks: Vec<F::Block>,
    last: Option<<F as Family>::Block>,
}

pub struct Leaves;

impl Family for Leaves {
    type Block = Leaf;
}

fn assert_module<T: FsdpUnit>(_: &T) {}

pub(crate) fn main() {
    let leaf = || Leaf { weight: Param::new(2) };
    let outer: Outer<*const str, Leaf> = Outer { inner: leaf(), head: Param::new(3), _phantom: PhantomData };
    assert_module(&outer);
    let deep: Deep<_, _, Leaf> = Deep { a: outer, b: vec![leaf()] };
    assert_module(&deep);
    assert_module(&Wrapped { outer: Outer { inner: leaf(), head: Param::new(3), _phantom: PhantomData } });
    assert_module(&Stack::<Leaves> { blocks: vec![leaf()], last: None });
}
