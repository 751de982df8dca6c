//! Types that contain themselves or one another.

use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
pub struct Node {
    pub weight: Param,
    pub next: Option<Box<Node>>,
}

#[derive(FsdpUnit)]
pub struct Tree<T> {
    pub weight: Param,
    #[fsdp(skip)]
    pub tag: T,
    pub children: Vec<Tree<T>>,
}

#[derive(FsdpUnit)]
pub struct A {
    pub weight: Param,
    pub b: Vec<B>,
}

#[derive(FsdpUnit)]
pub struct B {
    pub weight: Param,
    pub a: Option<Box<A>>,
}

fn assert_module<T: FsdpUnit>(_: &T) {}

pub(crate) fn main() {
    let param = || Param::new(1);
    assert_module(&Node { weight: param(), next: Some(Box::new(Node { weight: param(), next: None })) });
    assert_module(&Tree { weight: param(), tag: 1_u8, children: vec![] });
    assert_module(&A { weight: param(), b: vec![B { weight: param(), a: None }] });
}
