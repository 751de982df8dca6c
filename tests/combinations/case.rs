//! One combination: its settings, its data, and what it must cost.

use candle_core::{Device, Result, Tensor};
use fsdp::prelude::*;

use crate::net::DIM;

/// Optimizer steps of a run.
pub const STEPS: usize = 3;

/// What is awkward about the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awkward {
    Nothing,
    /// The head is the embedding.
    TiedInRoot,
    /// The first block's matrix is the last one's too.
    TiedAcrossUnits,
    /// The embedding and a whole unit are frozen.
    Frozen,
    /// A parameter, and a whole unit, get no gradient.
    Unused,
}

/// A combination of settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    pub outer_ranks: usize,
    pub shard_ranks: usize,
    pub cp_ranks: usize,
    pub strategy: Strategy,
    pub outer: OuterStrategy,
    pub reshard: ReshardAfterForward,
    pub half: bool,
    pub recompute: Recompute,
    pub microbatches: usize,
    pub awkward: Awkward,
    pub alignment: ShardAlignment,
}

impl Case {
    /// All of them that make sense.
    pub fn all() -> Vec<Case> {
        let mut cases = Vec::new();
        for (outer_ranks, shard_ranks, cp_ranks) in [
            (1, 1, 1),
            (1, 2, 1),
            (1, 3, 1),
            (1, 4, 1),
            (2, 1, 1),
            (2, 2, 1),
            (3, 1, 1),
            (1, 2, 2),
            (2, 3, 1),
        ] {
            for strategy in Strategy::ALL {
                for outer in [OuterStrategy::NoShard, OuterStrategy::Optim] {
                    for reshard in [
                        ReshardAfterForward::Always,
                        ReshardAfterForward::Never,
                        ReshardAfterForward::Ranks(2),
                    ] {
                        for half in [false, true] {
                            for recompute in [Recompute::None, Recompute::Unit] {
                                for microbatches in [1, 3] {
                                    for awkward in [
                                        Awkward::Nothing,
                                        Awkward::TiedInRoot,
                                        Awkward::TiedAcrossUnits,
                                        Awkward::Frozen,
                                        Awkward::Unused,
                                    ] {
                                        for alignment in [ShardAlignment::Element, ShardAlignment::Row] {
                                            cases.push(Case {
                                                outer_ranks,
                                                shard_ranks,
                                                cp_ranks,
                                                strategy,
                                                outer,
                                                reshard,
                                                half,
                                                recompute,
                                                microbatches,
                                                awkward,
                                                alignment,
                                            });
                                        }
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
        cases.retain(Case::makes_sense);
        cases
    }

    fn makes_sense(&self) -> bool {
        let inner = self.shard_ranks * self.cp_ranks;
        let outer_cuts_nothing = self.outer == OuterStrategy::Optim
            && (self.outer_ranks == 1 || inner > 1 && !self.strategy.shards_optim());
        let reshards_nothing = self.reshard != ReshardAfterForward::Always && !self.shards_params();
        let no_such_group = self.reshard == ReshardAfterForward::Ranks(2) && !inner.is_multiple_of(2);
        !(outer_cuts_nothing || reshards_nothing || no_such_group)
    }

    pub fn ranks(&self) -> usize {
        self.outer_ranks * self.shard_ranks * self.cp_ranks
    }

    pub fn mesh(&self) -> [(&'static str, usize); 3] {
        [("dp_outer", self.outer_ranks), ("dp_shard", self.shard_ranks), ("cp", self.cp_ranks)]
    }

    pub fn config(&self) -> FsdpConfig {
        FsdpConfig {
            strategy: self.strategy,
            outer: self.outer,
            reshard_after_forward: self.reshard,
            precision: if self.half { MixedPrecision::BF16 } else { MixedPrecision::F32 },
            recompute: self.recompute,
            alignment: self.alignment,
            // What is not kept is counted.
            double_buffer: false,
            poison: true,
            ..FsdpConfig::default()
        }
    }

    pub fn optimizer(&self) -> Sgd {
        Sgd::default().lr(0.05).momentum(0.9)
    }

    /// A rank's batch: rows of small values that depend on everything.
    pub fn input(&self, step: usize, microbatch: usize, rank: usize) -> Result<Tensor> {
        let base = (step * 7 + microbatch) * 31 + rank * 3;
        let values: Vec<f32> = (0..2 * DIM).map(|i| ((base + i * 5) % 17) as f32 / 8.0 - 1.0).collect();
        let x = Tensor::from_vec(values, (2, DIM), &Device::Cpu)?;
        if self.half { x.to_dtype(candle_core::DType::BF16) } else { Ok(x) }
    }

    /// How far from plain candle the weights may be.
    pub fn tolerance(&self) -> f64 {
        if self.half { 1e-3 } else { 1e-6 }
    }

    /// What determines the bits of the result: the order of sums, but not what is sharded, when it is gathered, or
    /// what is computed twice. Microbatches are summed before the ranks (ZeRO-0 and 1) or after.
    pub fn same_bits(&self) -> String {
        let Case { outer_ranks, shard_ranks, cp_ranks, half, microbatches, awkward, .. } = self;
        let inner = shard_ranks * cp_ranks;
        let late = *microbatches > 1 && !self.strategy.shards_grads();
        format!("{outer_ranks} x {inner}, {half}, {microbatches}, {awkward:?}, {late}")
    }

    fn shards_params(&self) -> bool {
        self.shard_ranks * self.cp_ranks > 1 && self.strategy.shards_params()
    }

    /// All-gathers, reduce-scatters and all-reduces of one step.
    pub fn collectives(&self, step: usize) -> [u64; 3] {
        let microbatches = self.microbatches as u64;
        // The root, two blocks and one that is inside another unit, which has weights of its own; the third block
        // is left out where something is to be unused.
        let units: u64 = if self.awkward == Awkward::Unused { 4 } else { 5 };
        let trainable = units + 1 - u64::from(self.awkward == Awkward::Frozen);
        let gathers = match self.strategy {
            Strategy::NoShard => 0,
            // Their shards are whole weights.
            _ if self.shard_ranks * self.cp_ranks == 1 => 0,
            // Once after each step, whatever the number of microbatches; what is frozen once for all.
            Strategy::Optim | Strategy::OptimGrads => {
                if step == 0 {
                    units + 1
                } else {
                    trainable
                }
            }
            Strategy::OptimGradsParams => {
                // A nested unit runs once more when the unit around it is recomputed.
                let again = u64::from(self.recompute == Recompute::Unit);
                let backward = match self.reshard {
                    ReshardAfterForward::Never => again,
                    _ => units + again,
                };
                microbatches * (1 + units + backward)
            }
        };
        let (mut scatters, mut reduces) = match self.strategy {
            Strategy::NoShard => (0, trainable),
            Strategy::Optim => (trainable, 0),
            _ => (microbatches * trainable, 0),
        };
        let mut outer_gathers = 0;
        if self.outer_ranks > 1 {
            match self.outer {
                OuterStrategy::NoShard => reduces += trainable,
                OuterStrategy::Optim => {
                    scatters += trainable;
                    outer_gathers = if step == 0 { 0 } else { trainable };
                }
            }
        }
        [gathers + outer_gathers, scatters, reduces]
    }
}
