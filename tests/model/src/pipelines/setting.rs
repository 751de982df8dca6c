//! What one execution trains, and how: chosen by the checker, the same on all ranks.

use crate::check::{choose, choose_of};
use crate::schedule::Sync;
use crate::spec::{Dtype, OuterStrategy, Strategy};

/// A use of a unit in the forward, with the uses of other units inside it.
#[derive(Debug)]
pub(super) struct Use {
    pub unit: usize,
    pub inner: &'static [Use],
}

impl Use {
    /// Most uses around one.
    pub(super) fn depth(&self) -> usize {
        self.inner.iter().map(|inner| 1 + inner.depth()).max().unwrap_or(0)
    }
}

const fn leaf(unit: usize) -> Use {
    Use { unit, inner: &[] }
}

/// Forwards of three or four units.
const FORWARDS: [&[Use]; 6] = [
    &[leaf(1), leaf(2), leaf(3)],
    &[leaf(1), leaf(2), leaf(3), leaf(4)],
    &[leaf(2), leaf(1), leaf(3)],
    &[leaf(1), leaf(2), leaf(1), leaf(3)],
    &[Use { unit: 1, inner: &[leaf(2)] }, leaf(3)],
    &[Use { unit: 1, inner: &[Use { unit: 2, inner: &[leaf(3)] }] }, leaf(4)],
];

/// Units, the root included.
pub(super) const UNITS: usize = 5;

/// What units do with their whole weights between forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Always,
    Never,
    Within,
    /// One unit after the other.
    Mixed,
}

/// How the weights change after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Update {
    Step,
    LoadAll,
    LoadUnit(usize),
    /// Not at all: the next step begins with what was gathered.
    Nothing,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Setting {
    /// Ranks that share the shards.
    pub inner: usize,
    pub outer: usize,
    pub strategy: Strategy,
    pub outer_strategy: OuterStrategy,
    pub depth: usize,
    pub prefetch: usize,
    pub budget: Option<usize>,
    pub reduce_budget: Option<usize>,
    /// The root has two buckets, of which the second is reduced as soon as it is complete.
    pub split_root: bool,
    /// No two units are alike.
    pub unequal: bool,
    pub double_buffer: bool,
    pub poison: bool,
    pub reshard: Mode,
    pub wire: Dtype,
    /// Of the weights; those of 16 bits are copies of f32 ones.
    pub weights: Dtype,
    /// Units have a frozen group too.
    pub frozen: bool,
    /// The compute stream is a thread of its own, as it is on a device, not the rank's.
    pub device: bool,
    pub forwards: [&'static [Use]; 2],
    pub microbatches: &'static [Sync],
    /// A unit that has no backward in the first microbatch.
    pub skipped: Option<usize>,
    pub evaluate: bool,
    /// Inner units run again before their backward.
    pub recompute: bool,
    /// The first gather is asked for ahead of the forward.
    pub unshard: bool,
    /// Between forward and backward all reductions are waited for and weights not in use are given up, as where
    /// the norm of the gradients is asked for.
    pub settle: bool,
    pub updates: [Update; 2],
    /// The first step is given up in its backward, after so many uses.
    pub cut: Option<usize>,
}

impl Setting {
    pub(super) fn choose(inner: usize, outer: usize) -> Setting {
        use Strategy::{NoShard, Optim, OptimGrads, OptimGradsParams};
        let strategies = [
            NoShard,
            Optim,
            OptimGrads,
            OptimGradsParams,
            OptimGradsParams,
            OptimGradsParams,
            OptimGradsParams,
        ];
        let strategy = choose_of(&strategies);
        let shares_optim = outer > 1 && strategy.shards_optim() && choose(2) == 0;
        let updates = [
            Update::Step,
            Update::Step,
            Update::LoadAll,
            Update::LoadUnit(2),
            Update::LoadUnit(0),
            Update::Nothing,
        ];
        let first = choose_of(&FORWARDS);
        Setting {
            inner,
            outer,
            strategy,
            outer_strategy: if shares_optim { OuterStrategy::Optim } else { OuterStrategy::NoShard },
            depth: 1 + choose(2),
            prefetch: choose(3),
            budget: (choose(4) == 0).then_some(100),
            reduce_budget: (choose(4) == 0).then(|| 150 * choose(3)),
            split_root: choose(3) == 0,
            unequal: choose(2) == 0,
            double_buffer: choose(3) > 0,
            poison: choose(2) == 0,
            reshard: choose_of(&[Mode::Always, Mode::Never, Mode::Within, Mode::Mixed]),
            wire: choose_of(&[Dtype::F32, Dtype::F32, Dtype::BF16]),
            weights: choose_of(&[Dtype::F32, Dtype::BF16]),
            frozen: choose(3) == 0,
            device: choose(2) == 0,
            forwards: [first, if choose(3) == 0 { choose_of(&FORWARDS) } else { first }],
            microbatches: choose_of::<&[Sync]>(&[
                &[Sync::Step],
                &[Sync::Nothing, Sync::Step],
                &[Sync::Microbatch, Sync::Step],
                &[Sync::Nothing, Sync::Nothing],
            ]),
            skipped: (choose(4) == 0).then_some(3),
            evaluate: choose(4) == 0,
            recompute: choose(2) == 0,
            unshard: choose(4) == 0,
            settle: choose(4) == 0,
            updates: [choose_of(&updates), choose_of(&updates)],
            cut: (choose(6) == 0).then(|| choose(3)),
        }
    }

    /// What a unit does, never [`Mode::Mixed`].
    pub(super) fn reshard_of(&self, unit: usize) -> Mode {
        match self.reshard {
            Mode::Mixed => [Mode::Always, Mode::Within, Mode::Never][unit % 3],
            mode => mode,
        }
    }

    pub(super) fn ranks(&self) -> usize {
        self.inner * self.outer
    }
}
