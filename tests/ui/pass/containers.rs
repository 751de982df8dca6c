//! Every container of modules, every plain type that is left out unasked, and the rest with `skip`.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
pub struct Leaf {
    pub weight: Param,
}

#[derive(FsdpUnit)]
pub struct Model {
    pub vec: Vec<Leaf>,
    pub option: Option<Leaf>,
    pub boxed: Box<Leaf>,
    pub array: [Leaf; 2],
    pub tuple: (Leaf, Leaf),
    pub map: BTreeMap<String, Leaf>,
    pub nested: Vec<Vec<Leaf>>,
    pub option_box: Option<Box<Leaf>>,
    pub params: Vec<Param>,
    pub param: Option<Param>,
    pub pair: (Param, Leaf),
    pub arc: Arc<Leaf>,
    pub slice: Box<[Leaf]>,
    pub unit: (),
    pub name: String,
    pub heads: usize,
    pub window: Option<usize>,
    pub dims: Vec<usize>,
    pub betas: (f32, f32),
    pub stride: [usize; 2],
    #[fsdp(skip)]
    pub hash_map: HashMap<String, Leaf>,
    #[fsdp(skip)]
    pub rc: Rc<Leaf>,
    #[fsdp(skip)]
    pub function: Box<dyn Fn()>,
    #[fsdp(skip)]
    pub mutex: Mutex<Leaf>,
}

pub(crate) fn main() {
    fn assert_module<T: FsdpUnit>() {}
    assert_module::<Model>();
}
