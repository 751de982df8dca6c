//! A unit inside a recomputed unit runs once more for each backward of the unit around it, and is reduced once all the
//! same.

use candle_core::{Result, Tensor};
use fsdp::prelude::*;

use crate::fixtures::{config, full, gradients, named, on_ranks};

/// `x * w`
#[derive(FsdpUnit)]
struct Scale {
    w: Param,
}

impl Forward for Scale {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        x.broadcast_mul(&self.w.tensor(scope)?)
    }
}

fn scale() -> Unit<Scale> {
    Unit::new(Scale { w: Param::new(1).with_init(Init::Constant(2.0)) })
}

/// `inner(inner(x)) * w`
#[derive(FsdpUnit)]
struct Outer {
    inner: Unit<Scale>,
    w: Param,
}

impl Forward for Outer {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let x = self.inner.forward(&self.inner.forward(x, &(), scope)?, &(), scope)?;
        x.broadcast_mul(&self.w.tensor(scope)?)
    }
}

#[derive(FsdpUnit)]
struct Model {
    outer: Unit<Outer>,
    last: Unit<Scale>,
}

fn model() -> Model {
    let w = Param::new(1).with_init(Init::Constant(2.0));
    Model { outer: Unit::new(Outer { inner: scale(), w }), last: scale() }
}

/// The outer unit so many times in a row.
impl Forward<usize> for Model {
    fn forward(&self, x: &Tensor, times: &usize, scope: &Scope<'_>) -> Result<Tensor> {
        let mut x = x.clone();
        for _ in 0..*times {
            x = self.outer.forward(&x, &(), scope)?;
        }
        self.last.forward(&x, &(), scope)?.sum_all()
    }
}

/// The inner unit by itself, after the outer one.
impl Forward<(), (Tensor, bool)> for Model {
    fn forward(&self, (x, inner_last): &(Tensor, bool), _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        if *inner_last {
            self.outer.inner.forward(&self.outer.forward(x, &(), scope)?, &(), scope)?.sum_all()
        } else {
            self.outer.forward(&self.outer.inner.forward(x, &(), scope)?, &(), scope)?.sum_all()
        }
    }
}

fn reductions<M>(model: &Fsdp<M>) -> u64 {
    let traffic = model.traffic();
    let reduces = traffic.iter().filter(|t| ["reduce-scatter", "all-reduce"].contains(&t.operation));
    reduces.map(|t| t.counter.calls).sum()
}

/// Every mesh, strategy and scaling in which a second reduction would be wrong, and the others.
fn everywhere(check: impl Fn(usize, usize, &FsdpConfig)) {
    for (outer, inner) in [(1, 2), (2, 2), (2, 1)] {
        for strategy in Strategy::ALL {
            for scaling in [GradientScaling::Mean, GradientScaling::Sum] {
                for outer_strategy in [OuterStrategy::NoShard, OuterStrategy::Optim] {
                    if outer_strategy == OuterStrategy::Optim && (outer == 1 || !strategy.shards_optim()) {
                        continue;
                    }
                    for recompute in [Recompute::None, Recompute::Unit] {
                        let config =
                            FsdpConfig { outer: outer_strategy, scaling, recompute, ..config(strategy) };
                        check(outer, inner, &config);
                    }
                }
            }
        }
    }
}

/// The mean or the sum over the ranks of `1 + rank`.
fn factor(ranks: usize, config: &FsdpConfig) -> f32 {
    let sum = (1..=ranks).sum::<usize>() as f32;
    if config.scaling == GradientScaling::Mean { sum / ranks as f32 } else { sum }
}

#[test]
fn called_again_in_one_forward() {
    everywhere(|outer, inner, config| {
        on_ranks(outer * inner, |world| {
            let mesh = world.mesh(&[("dp_outer", outer), ("dp_shard", inner)])?;
            let mut model = model().fully_shard_with(&mesh, config)?;
            let factor = factor(world.size(), config);
            for times in [1, 2, 3] {
                let before = reductions(&model);
                let loss: Tensor = model.forward_with(&full(1, 1.0 + world.rank() as f32), &times)?;
                model.backward(&loss)?;
                // Each factor of 2 that a weight gives counts half of the output.
                let half = factor * 8f32.powi(times as i32);
                let [outer_w, inner_w] = [times as f32 * half, 2.0 * times as f32 * half];
                let expected =
                    named(&[("outer.w", &[outer_w]), ("outer.inner.w", &[inner_w]), ("last.w", &[half])]);
                assert_eq!(gradients(&model)?, expected, "{outer} x {inner}, {times}, {config:?}");
                // Among the inner ranks, be it one, and among the outer ones.
                let launches = if outer > 1 { 6 } else { 3 };
                assert_eq!(reductions(&model) - before, launches, "{outer} x {inner}, {times}, {config:?}");
                model.reset_step()?;
            }
            Ok(())
        });
    });
}

#[test]
fn called_in_two_forwards_of_one_backward() {
    everywhere(|outer, inner, config| {
        on_ranks(outer * inner, |world| {
            let mesh = world.mesh(&[("dp_outer", outer), ("dp_shard", inner)])?;
            let mut model = model().fully_shard_with(&mesh, config)?;
            let factor = factor(world.size(), config);
            for _ in 0..2 {
                let x = full(1, 1.0 + world.rank() as f32);
                let first: Tensor = model.forward_with(&x, &1)?;
                let second: Tensor = model.forward_with(&(x * 3.0)?, &1)?;
                model.backward(&(second - first)?)?;
                let half = factor * 2.0 * 8.0;
                let expected =
                    named(&[("outer.w", &[half]), ("outer.inner.w", &[2.0 * half]), ("last.w", &[half])]);
                assert_eq!(gradients(&model)?, expected, "{outer} x {inner}, {config:?}");
                model.reset_step()?;
            }
            Ok(())
        });
    });
}

#[test]
fn called_inside_and_outside_of_the_recomputed_unit() {
    everywhere(|outer, inner, config| {
        on_ranks(outer * inner, |world| {
            let mesh = world.mesh(&[("dp_outer", outer), ("dp_shard", inner)])?;
            let mut model = model().fully_shard_with(&mesh, config)?;
            let mut optimizer = model.optimizer(Sgd::default().lr(0.0))?;
            let half = factor(world.size(), config) * 8.0;
            let expected = named(&[("outer.w", &[half]), ("outer.inner.w", &[3.0 * half])]);
            let x = full(1, 1.0 + world.rank() as f32);
            for inner_last in [false, true] {
                let loss: Tensor = model.forward(&(x.clone(), inner_last))?;
                let outcome = model.backward(&loss);
                // Its last use is the first in the backward, which cannot know of the recomputation to come.
                let reduced_early = inner_last
                    && config.recompute == Recompute::Unit
                    && (outer > 1 || !config.strategy.shards_grads());
                if reduced_early {
                    let text = outcome.unwrap_err().to_string();
                    for part in ["unit `outer.inner`", "backward", "runs it again", "no_sync"] {
                        assert!(text.contains(part), "{part} in {text}");
                    }
                    let loss: Tensor = model.forward(&(x.clone(), inner_last))?;
                    let guard = model.no_sync();
                    model.backward(&loss)?;
                    drop(guard);
                } else {
                    outcome?;
                }
                assert_eq!(gradients(&model)?, expected, "{outer} x {inner}, {inner_last}, {config:?}");
                optimizer.step(&mut model)?;
            }
            Ok(())
        });
    });
}
