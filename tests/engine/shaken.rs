//! Delays change nothing in the numbers: before gathers, before reductions, in forwards, before optimizer steps, on
//! one rank or on all.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor};
use fsdp::prelude::*;

use crate::fixtures::{config, launcher, weights};

/// Holds a rank up where the test's own code runs: one rank or all, as the seed has it.
#[derive(Clone)]
struct Pauses {
    seed: Option<u64>,
    rank: u64,
    taken: Arc<AtomicU64>,
}

impl Pauses {
    fn new(seed: Option<u64>, rank: usize) -> Pauses {
        Pauses { seed, rank: rank as u64, taken: Arc::default() }
    }

    /// Up to 300 microseconds, in a quarter of the cases.
    fn maybe(&self) {
        let Some(seed) = self.seed.filter(|seed| seed % 3 != 0 || seed / 3 % 2 == self.rank) else { return };
        let place = [seed, self.rank, self.taken.fetch_add(1, Ordering::Relaxed)];
        // FNV-1a, with the high half folded down, as its low bits alone are poor.
        let draw = place.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, part| {
            let hash = (hash ^ part).wrapping_mul(0x0000_0100_0000_01b3);
            hash ^ (hash >> 29)
        });
        if draw % 4 == 0 {
            std::thread::sleep(Duration::from_micros((draw >> 16) % 300));
        }
    }
}

/// A unit inside a unit.
#[derive(FsdpUnit)]
struct Inner {
    w: Param,
}

impl Forward<Pauses> for Inner {
    fn forward(&self, x: &Tensor, pauses: &Pauses, scope: &Scope<'_>) -> Result<Tensor> {
        pauses.maybe();
        (x * self.w.tensor(scope)?)?.tanh()
    }
}

/// `x + scale * inner(x) + base`, where the base is frozen.
#[derive(FsdpUnit)]
struct Block {
    scale: Param,
    #[fsdp(frozen)]
    base: Param,
    inner: Unit<Inner>,
}

impl Forward<Pauses> for Block {
    fn forward(&self, x: &Tensor, pauses: &Pauses, scope: &Scope<'_>) -> Result<Tensor> {
        pauses.maybe();
        let inner = (self.inner.forward(x, pauses, scope)? * self.scale.tensor(scope)?)?;
        (x + inner)? + self.base.tensor(scope)?
    }
}

/// The dot product with a weight that is the root's embedding.
#[derive(FsdpUnit)]
struct Head {
    weight: Param,
}

impl Forward for Head {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        (x * self.weight.tensor(scope)?)?.sum_all()
    }
}

#[derive(FsdpUnit)]
struct Net {
    embed: Param,
    blocks: Vec<Unit<Block>>,
    head: Unit<Head>,
}

/// Elements of every parameter: shards are uneven and padded.
const WIDTH: usize = 37;

impl Net {
    fn new() -> Net {
        let param = || Param::new(WIDTH).with_init(Init::Normal { mean: 0.0, std: 0.5 });
        let block = || Block { scale: param(), base: param(), inner: Unit::new(Inner { w: param() }) };
        let embed = param();
        let head = Unit::new(Head { weight: embed.clone() });
        Net { embed, blocks: (0..3).map(|_| Unit::new(block())).collect(), head }
    }
}

impl Forward<Pauses> for Net {
    fn forward(&self, x: &Tensor, pauses: &Pauses, scope: &Scope<'_>) -> Result<Tensor> {
        let mut x = (x * self.embed.tensor(scope)?)?;
        for block in &self.blocks {
            x = block.forward(&x, pauses, scope)?;
        }
        self.head.forward(&x, &(), scope)
    }
}

/// What a rank has seen: losses and norms, then the weights, to the bit.
type Numbers = (Vec<u64>, Vec<Vec<u32>>);

/// Two steps of two microbatches on `outer` x 2 ranks, shaken by `seed`.
fn train(outer: usize, config: &FsdpConfig, seed: Option<u64>) -> Vec<Numbers> {
    let mut launcher = launcher(2 * outer);
    if let Some(seed) = seed {
        launcher = launcher.shake(seed);
    }
    let outcome = launcher.run(|world| -> fsdp::Result<Numbers> {
        let mesh = world.mesh(&[("dp_outer", outer), ("dp_shard", 2)])?;
        let pauses = Pauses::new(seed, world.rank());
        let mut model = Net::new().fully_shard_with(&mesh, config)?;
        let mut optimizer = model.optimizer(AdamW::default().lr(0.1))?;
        let input = |at: usize| {
            let values = (0..WIDTH).map(|i| ((i * 7 + at * 3 + world.rank() * 5) % 11) as f32 / 4.0 - 1.0);
            Tensor::from_iter(values, &Device::Cpu)
        };
        let mut seen = Vec::new();
        for step in 0..2 {
            for microbatch in 0..2 {
                model.set_is_last_microbatch(microbatch == 1);
                let loss: Tensor = model.forward_with(&input(2 * step + microbatch)?, &pauses)?;
                model.backward(&loss)?;
                seen.push(u64::from(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?.to_bits()));
            }
            seen.push(model.clip_grad_norm(1.0)?.to_bits());
            pauses.maybe();
            optimizer.step(&mut model)?;
        }
        let weights = weights(&model)?.into_iter().map(|(_, w)| w.iter().map(|w| w.to_bits()).collect());
        Ok((seen, weights.collect()))
    });
    outcome.unwrap_or_else(|error| panic!("seed {seed:?}, outer {outer}, {config:?}: {error}"))
}

/// 8 seeds for each of up to 12 ways to run a strategy.
fn shake(strategy: Strategy) {
    let mut seed = strategy as u64 * 1000;
    for (outer, outer_strategy) in
        [(1, OuterStrategy::NoShard), (2, OuterStrategy::NoShard), (2, OuterStrategy::Optim)]
    {
        if outer_strategy == OuterStrategy::Optim && strategy == Strategy::NoShard {
            continue;
        }
        for double_buffer in [true, false] {
            for recompute in [Recompute::None, Recompute::Unit] {
                let config =
                    FsdpConfig { outer: outer_strategy, double_buffer, recompute, ..config(strategy) };
                let calm = train(outer, &config, None);
                for _ in 0..8 {
                    seed += 1;
                    let shaken = train(outer, &config, Some(seed));
                    assert!(shaken == calm, "seed {seed}, outer {outer}, {config:?}");
                }
            }
        }
    }
}

#[test]
fn a_shaken_schedule_gives_the_same_bits_without_sharding() {
    shake(Strategy::NoShard);
}

#[test]
fn a_shaken_schedule_gives_the_same_bits_with_sharded_optimizer() {
    shake(Strategy::Optim);
}

#[test]
fn a_shaken_schedule_gives_the_same_bits_with_sharded_gradients() {
    shake(Strategy::OptimGrads);
}

#[test]
fn a_shaken_schedule_gives_the_same_bits_with_sharded_parameters() {
    shake(Strategy::OptimGradsParams);
}
