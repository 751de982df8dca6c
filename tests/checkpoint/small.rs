//! A small model in training, whose state after any number of steps is known.

use candle_core::{Device, Result, Tensor};
use fsdp::checkpoint::{Contents, Restore, Restored};
use fsdp::engine::Ema;
use fsdp::launch::World;
use fsdp::prelude::*;

#[derive(FsdpUnit)]
pub struct Small {
    /// Not divisible by 2, 3 or 4.
    a: Param,
    b: Param,
}

impl Forward for Small {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let a = self.a.tensor(scope)?;
        x.broadcast_mul(&a.sin()?)?.sum_all()? + self.b.tensor(scope)?.sqr()?.sum_all()?
    }
}

/// A model, its optimizer and an average, on one rank.
pub struct Run {
    rank: usize,
    pub model: Fsdp<Small>,
    pub optimizer: ShardedOptimizer<AdamW>,
    pub average: Ema,
}

impl Run {
    pub fn start(world: &World) -> fsdp::Result<Run> {
        let small = Small { a: Param::new(7), b: Param::new((3, 2)) };
        let model = small.fully_shard(&world.data_parallel_mesh())?;
        let (optimizer, average) = (model.optimizer(AdamW::default().lr(1e-2))?, model.ema(0.9)?);
        Ok(Run { rank: world.rank(), model, optimizer, average })
    }

    /// Trains a step: as any run does that has taken as many steps, on as many ranks.
    pub fn step(&mut self) -> fsdp::Result<()> {
        let at = self.model.step_count() as usize;
        let x: Vec<f32> = (0..7).map(|i| ((i * 5 + at * 3 + self.rank * 7) % 13) as f32 - 6.0).collect();
        let loss: Tensor = self.model.forward(&Tensor::from_vec(x, 7, &Device::Cpu)?)?;
        self.model.backward(&loss)?;
        self.optimizer.step(&mut self.model)?;
        self.average.update(&self.model)
    }

    /// All of the state.
    pub fn contents(&self) -> Contents<'_> {
        let contents = Contents::of(&self.model).optimizer(&self.optimizer).average("ema", &self.average);
        contents.value("steps", &self.model.step_count())
    }

    pub fn restore(&mut self) -> Restore<'_> {
        Restore::new(&mut self.model).optimizer(&mut self.optimizer).average("ema", &mut self.average)
    }

    /// The bits of the weights. Every rank must call it.
    pub fn weights(&self) -> fsdp::Result<Vec<u32>> {
        let mut bits = Vec::new();
        self.model.visit_weights(|_, values| {
            bits.extend(values.iter().map(|value| value.to_bits()));
            Ok(())
        })?;
        Ok(bits)
    }

    /// That the restored state is what training has after as many steps.
    pub fn check_restored(&self, restored: &Restored, history: &History) -> fsdp::Result<()> {
        let steps = restored.checkpoint.step();
        assert_eq!(
            (self.model.step_count(), self.optimizer.steps(), self.average.updates()),
            (steps, steps, steps)
        );
        assert_eq!(restored.checkpoint.value::<u64>("steps").unwrap(), steps);
        assert_eq!(self.weights()?, history.0[steps as usize], "step {steps}");
        Ok(())
    }
}

/// The weights after each number of steps on two ranks, from 0 on.
pub struct History(pub Vec<Vec<u32>>);

impl History {
    pub fn new(steps: usize) -> History {
        let histories = launch::local(2, |world| -> fsdp::Result<_> {
            let mut run = Run::start(&world)?;
            let mut history = vec![run.weights()?];
            for _ in 0..steps {
                run.step()?;
                history.push(run.weights()?);
            }
            Ok(history)
        });
        History(histories.unwrap().swap_remove(0))
    }
}
