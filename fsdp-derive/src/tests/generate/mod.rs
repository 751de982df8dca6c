//! Makes items that `#[derive(FsdpUnit)]` must accept, as text: every kind of item, generics, field, type,
//! attribute and spelling that the documentation allows, mixed at random but the same on every run.
//!
//! Plain std, because it is read twice: here, where the derive is a function of tokens, and by the
//! package `tests/ui`, where rustc compiles what it makes.

mod generics;
mod item;
mod maker;

pub use item::{Field, Fields, Item, Kind};
pub use maker::valid;

/// splitmix64: enough to pick, the same on every run.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    /// True so many times in a hundred.
    pub fn percent(&mut self, chance: usize) -> bool {
        self.below(100) < chance
    }

    pub fn pick<'a>(&mut self, from: &[&'a str]) -> &'a str {
        from[self.below(from.len())]
    }
}

/// What the items refer to; they reach it as `super::prelude`.
pub const PRELUDE: &str = "\
pub use std::{cell::RefCell, collections::{BTreeMap, HashMap}, marker::PhantomData, sync::{Arc, Mutex}};
pub use candle_core::Tensor;
pub use fsdp::{self, FsdpUnit, Param, Unit};
pub const DIM: usize = 8;
pub const RANKS: usize = 2;
pub const STD: f32 = 0.02;
pub const fn size(n: usize) -> usize { 2 * n }
#[derive(FsdpUnit)] pub struct Leaf { pub weight: Param }
#[derive(FsdpUnit)] pub struct Outer<M> { pub module: M }
pub trait Family { type Block; }
pub struct Leaves;
impl Family for Leaves { type Block = Leaf; }
";
