//! A training whose state is compared.

use std::collections::BTreeMap;

use fsdp::checkpoint::{Contents, Restore};
use fsdp::engine::Ema;
use fsdp::launch::World;
use fsdp::prelude::*;

use crate::model::{Net, input, step};

/// A model in training, on one rank.
pub struct Run {
    rank: usize,
    pub model: Fsdp<Net>,
    pub optimizer: ShardedOptimizer<AdamW>,
    pub average: Ema,
}

/// The bits of weights and buffers, and the counters.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    pub tensors: BTreeMap<String, Vec<u64>>,
    pub counters: [u64; 4],
}

impl Run {
    pub fn start(world: &World, seed: u64) -> fsdp::Result<Run> {
        let config = FsdpConfig { seed, ..FsdpConfig::default() };
        let model = Net::new(2).fully_shard_with(&world.data_parallel_mesh(), &config)?;
        let (optimizer, average) = (model.optimizer(AdamW::default().lr(1e-2))?, model.ema(0.9)?);
        Ok(Run { rank: world.rank(), model, optimizer, average })
    }

    pub fn step(&mut self) -> fsdp::Result<()> {
        let input = input(self.rank, self.model.step_count() % 100);
        step(&mut self.model, &mut self.optimizer, &input)?;
        self.average.update(&self.model)
    }

    pub fn contents(&self) -> Contents<'_> {
        Contents::of(&self.model).optimizer(&self.optimizer).average("ema", &self.average)
    }

    pub fn restore(&mut self) -> Restore<'_> {
        Restore::new(&mut self.model).optimizer(&mut self.optimizer).average("ema", &mut self.average)
    }

    /// Every rank must call it.
    pub fn state(&self) -> fsdp::Result<State> {
        let mut tensors = BTreeMap::new();
        self.model.visit_weights(|spec, values| {
            let bits = values.iter().map(|value| u64::from(value.to_bits()));
            tensors.insert(spec.name.clone(), bits.collect());
            Ok(())
        })?;
        let Net { counts, mean, .. } = self.model.module();
        tensors.insert("counts".into(), counts.to_vec1::<u32>()?.into_iter().map(u64::from).collect());
        tensors
            .insert("mean".into(), mean.to_vec2::<f64>()?.concat().into_iter().map(f64::to_bits).collect());
        let rate = self.optimizer.learning_rate().to_bits();
        let counters = [self.model.step_count(), self.optimizer.steps(), self.average.updates(), rate];
        Ok(State { tensors, counters })
    }
}
