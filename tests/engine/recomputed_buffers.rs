//! A forward that runs again in the backward cannot be told from one that does not: by buffers, by outputs that depend on
//! them, or by a module that asks.

use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device, Result, Tensor};
use fsdp::prelude::*;

use crate::fixtures::{config, full, gradients, on_ranks};

/// `x * w * (1 + count)`, of which `count` counts the forwards, and `mean` runs along with `x`.
#[derive(FsdpUnit)]
struct Counts {
    w: Param,
    #[fsdp(buffer)]
    count: Tensor,
    #[fsdp(buffer)]
    running: Running,
    /// Forwards that were no recomputation, and those that were.
    #[fsdp(skip)]
    runs: [AtomicUsize; 2],
}

type Running = Vec<Tensor>;

impl Counts {
    fn new() -> Counts {
        let count = Tensor::zeros(1, DType::U32, &Device::Cpu).unwrap();
        // Its rows are not contiguous.
        let mean = Tensor::zeros((3, 2), DType::F32, &Device::Cpu).unwrap().t().unwrap();
        let w = Param::new(3).with_init(Init::Constant(0.5));
        Counts { w, count, running: vec![mean], runs: Default::default() }
    }
}

/// Writes `values` into the storage of `tensor`, whatever its strides.
fn overwrite(tensor: &Tensor, values: &Tensor) -> Result<()> {
    tensor.t()?.slice_set(&values.t()?.contiguous()?, 0, 0)
}

impl Forward for Counts {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.runs[usize::from(scope.is_recomputing())].fetch_add(1, Ordering::Relaxed);
        let factor = (self.count.to_dtype(DType::F32)? + 1.0)?;
        if scope.is_training() {
            let more = (&self.count + Tensor::ones(1, DType::U32, &Device::Cpu)?)?;
            self.count.slice_set(&more, 0, 0)?;
            let seen = Tensor::stack(&[x.detach(), x.detach()], 0)?;
            overwrite(&self.running[0], &((&self.running[0] * 0.5)? + seen)?)?;
        }
        (x * self.w.tensor(scope)?)?.broadcast_mul(&factor)
    }
}

/// A unit, and another one inside it.
#[derive(FsdpUnit)]
struct Pair {
    inner: Unit<Counts>,
    own: Counts,
}

impl Forward for Pair {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let x = self.inner.forward(x, &(), scope)?;
        self.own.forward(&x, &(), scope)
    }
}

#[derive(FsdpUnit)]
struct Net {
    pair: Unit<Pair>,
    last: Unit<Counts>,
    root: Counts,
}

impl Net {
    fn new() -> Net {
        let pair = Unit::new(Pair { inner: Unit::new(Counts::new()), own: Counts::new() });
        Net { pair, last: Unit::new(Counts::new()), root: Counts::new() }
    }

    fn modules(&self) -> [&Counts; 4] {
        [&self.pair.inner, &self.pair.own, &self.last, &self.root]
    }

    fn buffers(&self) -> Vec<(Vec<u32>, Vec<Vec<f32>>)> {
        let of = |module: &Counts| (module.count.to_vec1().unwrap(), module.running[0].to_vec2().unwrap());
        self.modules().map(of).into()
    }
}

impl Forward for Net {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        assert!(!scope.is_recomputing());
        let x = self.pair.forward(x, &(), scope)?;
        let x = self.last.forward(&x, &(), scope)?;
        self.root.forward(&x, &(), scope)?.sum_all()
    }
}

#[test]
fn buffers_outputs_and_gradients_are_those_without_recomputation() {
    type Seen = (Vec<f32>, Vec<(String, Vec<f32>)>, Vec<(Vec<u32>, Vec<Vec<f32>>)>);
    // Forwards of microbatches, each with the number of backwards that follow it.
    for schedule in [[1, 1, 1], [0, 2, 1], [0, 0, 3]] {
        let run = |recompute| -> Vec<Seen> {
            on_ranks(2, |world| {
                let config = FsdpConfig { recompute, ..config(Strategy::default()) };
                let mut model = Net::new().fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let mut optimizer = model.optimizer(Sgd::default().lr(0.01))?;
                let (mut losses, mut last) = (Vec::new(), Vec::new());
                for step in 0..3 {
                    let mut waiting = std::collections::VecDeque::new();
                    for (index, backwards) in schedule.into_iter().enumerate() {
                        let x = full(3, 0.25 * (1 + step + index + world.rank()) as f32);
                        let loss: Tensor = model.forward(&x)?;
                        losses.push(loss.to_scalar::<f32>()?);
                        waiting.push_back(loss);
                        for _ in 0..backwards {
                            model.backward(&waiting.pop_front().unwrap())?;
                        }
                    }
                    last = gradients(&model)?;
                    optimizer.step(&mut model)?;
                }
                let _: Tensor = model.evaluate(&full(3, 1.0))?;
                Ok((losses, last, model.module().buffers()))
            })
        };
        let (plain, recomputed) = (run(Recompute::None), run(Recompute::Unit));
        assert_eq!(recomputed, plain, "{schedule:?}");
        // 3 steps of 3 microbatches.
        assert!(plain[0].2.iter().all(|(count, _)| *count == [9]), "{:?}", plain[0].2);
    }
}

#[test]
fn a_count_is_that_of_the_steps() {
    for recompute in [Recompute::None, Recompute::Unit] {
        on_ranks(1, |world| {
            let config = FsdpConfig { recompute, ..config(Strategy::default()) };
            let mut model = Net::new().fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let mut optimizer = model.optimizer(Sgd::default().lr(0.0))?;
            for _ in 0..10 {
                let loss: Tensor = model.forward(&full(3, 1.0))?;
                model.backward(&loss)?;
                optimizer.step(&mut model)?;
            }
            assert!(model.module().buffers().iter().all(|(count, _)| *count == [10]), "{recompute:?}");
            Ok(())
        });
    }
}

#[test]
fn a_module_can_ask_whether_it_is_recomputed() {
    // Of the inner unit, what is around it, a unit by itself, and the root. The inner one runs again with the one around
    // it, and once more by itself.
    for (recompute, again) in [(Recompute::None, [0, 0, 0, 0]), (Recompute::Unit, [2, 1, 1, 0])] {
        on_ranks(2, |world| {
            let config = FsdpConfig { recompute, ..config(Strategy::default()) };
            let model = Net::new().fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let loss: Tensor = model.forward(&full(3, 1.0))?;
            model.backward(&loss)?;
            let runs = |kind: usize| {
                model.module().modules().map(|module| module.runs[kind].load(Ordering::Relaxed))
            };
            assert_eq!((runs(0), runs(1)), ([1; 4], again), "{recompute:?}");
            Ok(())
        });
    }
}

/// `w * x * count`, and it counts: `count` is a buffer of the root, which it holds a handle of.
#[derive(FsdpUnit)]
struct Follower {
    w: Param,
    #[fsdp(skip)]
    count: Tensor,
    #[fsdp(skip)]
    counts: bool,
}

#[derive(FsdpUnit)]
struct Leader {
    #[fsdp(buffer)]
    count: Tensor,
    follower: Unit<Follower>,
}

impl Leader {
    /// Who counts its forwards: the unit or the root.
    fn new(unit_counts: bool, recompute: Recompute) -> Leader {
        let count = Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap();
        let w = Param::new(3).with_init(Init::Constant(0.5));
        let follower = Follower { w, count: count.clone(), counts: unit_counts };
        Leader { count, follower: Unit::new(follower).recompute(recompute) }
    }
}

fn count_one(count: &Tensor) -> Result<()> {
    count.slice_set(&(count + 1.0)?, 0, 0)
}

impl Forward for Follower {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        if self.counts {
            count_one(&self.count)?;
        }
        (x * self.w.tensor(scope)?)?.broadcast_mul(&self.count.copy()?)?.sum_all()
    }
}

impl Forward for Leader {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        if !self.follower.counts {
            count_one(&self.count)?;
        }
        self.follower.forward(x, &(), scope)
    }
}

#[test]
fn buffers_of_other_modules_are_as_they_were_in_a_recomputation() {
    for recompute in [Recompute::None, Recompute::Unit] {
        for unit_counts in [false, true] {
            on_ranks(2, |world| {
                let model = Leader::new(unit_counts, recompute);
                let count = model.count.clone();
                let model = model
                    .fully_shard_with(&world.data_parallel_mesh(), &config(Strategy::OptimGradsParams))?;
                let losses = [model.forward(&full(3, 1.0))?, model.forward(&full(3, 1.0))?];
                for loss in &losses {
                    model.backward(loss)?;
                }
                // One forward with a count of 1, one with 2.
                assert_eq!(gradients(&model)?[0].1, [3.0; 3], "{recompute:?} {unit_counts}");
                assert_eq!(count.to_vec1::<f32>()?, [2.0], "{recompute:?} {unit_counts}");
                Ok(())
            });
        }
    }
}
