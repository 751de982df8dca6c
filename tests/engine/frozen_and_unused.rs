//! Frozen parameters, unused ones, and those that a cut graph starves.

use candle_core::{Result, Tensor};
use fsdp::prelude::*;

use crate::fixtures::{Two, config, full, gradients, named, on_ranks, weights};

/// `y_l = y_(l-1) + (base + adapter) * x`
#[derive(FsdpUnit)]
struct Adapted {
    #[fsdp(frozen)]
    base: Param,
    adapter: Param,
}

impl Forward<Tensor> for Adapted {
    fn forward(&self, y: &Tensor, x: &Tensor, scope: &Scope<'_>) -> Result<Tensor> {
        let weight = (self.base.tensor(scope)? + self.adapter.tensor(scope)?)?;
        y + weight.broadcast_mul(x)?
    }
}

#[derive(FsdpUnit)]
struct Stack {
    units: Vec<Unit<Adapted>>,
}

impl Forward for Stack {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut y = x.zeros_like()?;
        for unit in &self.units {
            y = unit.forward(&y, x, scope)?;
        }
        y.sum_all()
    }
}

#[test]
fn every_adapter_gets_its_gradient_whatever_is_frozen_around_it() {
    for strategy in Strategy::ALL {
        for recompute in [Recompute::None, Recompute::Unit] {
            on_ranks(2, |world| {
                let zero = || Param::new(1).with_init(Init::Zeros);
                let unit = || Unit::new(Adapted { base: zero(), adapter: zero() });
                let config = FsdpConfig { recompute, ..config(strategy) };
                let stack = Stack { units: (0..4).map(|_| unit()).collect() };
                let mut model = stack.fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let mut optimizer = model.optimizer(AdamW::default())?;
                let loss: Tensor = model.forward(&full(1, 3.0))?;
                model.backward(&loss)?;
                let gradients = gradients(&model)?;
                assert_eq!(gradients.len(), 4);
                assert!(gradients.iter().all(|(name, g)| name.ends_with("adapter") && g == &[3.0]));
                optimizer.step(&mut model)?;
                for (name, values) in weights(&model)? {
                    assert_eq!(values[0] == 0.0, name.ends_with("base"), "{name} {values:?}");
                }
                // No gradient, no main weight and no optimizer state for what is frozen.
                let per_state = if model.strategy() == Strategy::NoShard { 32 } else { 16 };
                assert_eq!(model.memory(2)[3].usage.current, 4 * per_state * 4 * 2);
                Ok(())
            });
        }
    }
}

#[test]
fn a_unit_unused_on_all_ranks_is_left_as_it_is() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let mut model = Two::zeros(3).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(AdamW::default().lr(0.1).weight_decay(0.1))?;
            for _ in 0..3 {
                let loss: Tensor = model.forward(&(true, false, full(3, 1.0)))?;
                model.backward(&loss)?;
                optimizer.step(&mut model)?;
            }
            assert_eq!(model.gathered_units(), Vec::<String>::new());
            let weights = weights(&model)?;
            assert!(weights[0].1.iter().all(|w| *w < -0.2));
            assert_eq!(weights[1].1, [0.0; 3], "{strategy}");
            Ok(())
        });
    }
}

#[test]
fn a_unit_that_was_prefetched_and_not_used_sees_later_steps_all_the_same() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let mut model = Two::zeros(3).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
            for (step, with_b) in [true, true, false, true, false, false, true].into_iter().enumerate() {
                let loss: Tensor = model.forward(&(true, with_b, full(3, 1.0)))?;
                model.backward(&loss)?;
                optimizer.step(&mut model)?;
                assert_eq!(weights(&model)?[0].1, [-(step as f32) - 1.0; 3], "{strategy}");
            }
            let loss: Tensor = model.evaluate(&(true, true, full(3, 1.0)))?;
            assert_eq!(loss.to_scalar::<f32>()?, -3.0 * (7.0 + 4.0), "{strategy}");
            Ok(())
        });
    }
}

#[test]
fn a_unit_used_in_some_microbatches_only_keeps_what_it_got() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let model = Two::zeros(3).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            for (a, b, last) in [(true, true, false), (false, true, false), (true, false, true)] {
                model.set_is_last_microbatch(last);
                let loss: Tensor = model.forward(&(a, b, full(3, 2.0)))?;
                model.backward(&loss)?;
            }
            assert_eq!(gradients(&model)?, named(&[("a.w", &[4.0; 3]), ("b.w", &[4.0; 3])]), "{strategy}");
            Ok(())
        });
    }
}

/// `w1` is cut off the graph, `w2` is not.
#[derive(FsdpUnit)]
struct Cut {
    w1: Param,
    w2: Param,
}

impl Forward for Cut {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let cut = (x * self.w1.tensor(scope)?.detach())?;
        (cut + (x * self.w2.tensor(scope)?)?)?.sum_all()
    }
}

/// Uses nothing of its input.
#[derive(FsdpUnit)]
struct Wall {
    w: Param,
}

impl Forward for Wall {
    fn forward(&self, _: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.w.tensor(scope)?.sum_all()
    }
}

#[derive(FsdpUnit)]
struct Walled {
    below: Unit<crate::fixtures::Dot>,
    wall: Unit<Wall>,
}

impl Forward for Walled {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.wall.forward(&self.below.forward(x, &(), scope)?, &(), scope)
    }
}

#[test]
fn a_unit_below_a_cut_counts_as_starved() {
    on_ranks(2, |world| {
        let model =
            Walled { below: crate::fixtures::Dot::zeros(3), wall: Unit::new(Wall { w: Param::new(3) }) };
        let model = model.fully_shard_with(&world.data_parallel_mesh(), &config(Strategy::default()))?;
        let loss: Tensor = model.forward(&full(3, 5.0))?;
        model.backward(&loss)?;
        assert_eq!(model.parameters_without_gradient()?, ["below.w"]);
        Ok(())
    });
}

#[derive(FsdpUnit)]
struct CutModel {
    unit: Unit<Cut>,
}

impl Forward for CutModel {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.unit.forward(x, &(), scope)
    }
}

#[test]
fn a_starved_parameter_is_named() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let config = FsdpConfig { strict_gradients: true, ..config(strategy) };
            let model = CutModel { unit: Unit::new(Cut { w1: Param::new(3), w2: Param::new(3) }) };
            let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let mut optimizer = model.optimizer(Sgd::default())?;
            let loss: Tensor = model.forward(&full(3, 5.0))?;
            model.backward(&loss)?;
            assert_eq!(model.parameters_without_gradient()?, ["unit.w1"]);
            assert_eq!(gradients(&model)?, named(&[("unit.w1", &[0.0; 3]), ("unit.w2", &[5.0; 3])]));
            let error = optimizer.step(&mut model).unwrap_err().to_string();
            assert!(error.contains("unit.w1") && !error.contains("unit.w2"), "{error}");
            Ok(())
        });
    }
}

#[test]
fn a_rank_without_work_for_a_unit_contributes_zeros() {
    /// `x + w`
    #[derive(FsdpUnit)]
    struct Shift {
        w: Param,
    }

    impl Forward for Shift {
        fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
            x + self.w.tensor(scope)?
        }
    }

    /// Rank 0 uses `a`; both use `b`.
    #[derive(FsdpUnit)]
    struct Model {
        a: Unit<Shift>,
        b: Unit<Shift>,
    }

    impl Forward<usize> for Model {
        fn forward(&self, x: &Tensor, rank: &usize, scope: &Scope<'_>) -> Result<Tensor> {
            let x = match rank {
                0 => self.a.forward(x, &(), scope)?,
                _ => self.a.contribute_zero(x, scope)?,
            };
            self.b.forward(&x, &(), scope)?.sum_all()
        }
    }

    for strategy in Strategy::ALL {
        for recompute in [Recompute::None, Recompute::Unit] {
            on_ranks(2, |world| {
                let config = FsdpConfig { recompute, ..config(strategy) };
                let shift = || Unit::new(Shift { w: Param::new(3).with_init(Init::Zeros) });
                let model = Model { a: shift(), b: shift() };
                let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
                for _ in 0..2 {
                    let loss: Tensor = model.forward_with(&full(3, 4.0), &world.rank())?;
                    model.backward(&loss)?;
                    assert_eq!(gradients(&model)?, named(&[("a.w", &[0.5; 3]), ("b.w", &[1.0; 3])]));
                    optimizer.step(&mut model)?;
                }
                assert_eq!(weights(&model)?, named(&[("a.w", &[-1.0; 3]), ("b.w", &[-2.0; 3])]));
                Ok(())
            });
        }
    }
}
