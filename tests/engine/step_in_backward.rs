//! The optimizer's step inside the backward: the same bits, without main gradients that stay.

use candle_core::{DType, Device, Result, Tensor};
use fsdp::memory::Category;
use fsdp::prelude::*;

use crate::fixtures::{Dot, config, dot, full, named, on_ranks, weights};

const SHARDED: [Strategy; 2] = [Strategy::OptimGrads, Strategy::OptimGradsParams];

/// Units of several sizes, one of them used twice and one frozen, and a parameter of the root.
#[derive(FsdpUnit)]
struct Model {
    scale: Param,
    units: Vec<Unit<Dot>>,
    #[fsdp(frozen)]
    frozen: Unit<Dot>,
}

const SIZES: [usize; 4] = [100, 7, 100, 333];

impl Model {
    fn new() -> Model {
        let scale = Param::new(1).with_init(Init::Constant(0.5));
        Model { scale, units: SIZES.iter().map(|&n| Dot::with(n, 0.25)).collect(), frozen: Dot::with(7, 1.0) }
    }
}

impl Forward for Model {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut loss = Tensor::zeros((), DType::F32, &Device::Cpu)?;
        let uses = self.units.iter().chain([&self.units[1], &self.frozen]).zip([100, 7, 100, 333, 7, 7]);
        for (index, (unit, n)) in uses.enumerate() {
            let x = (x.narrow(0, 0, n)? * (index as f64 + 1.0))?;
            // The square makes the gradient depend on the weights.
            loss = (loss + unit.forward(&x, &(), scope)?.to_dtype(DType::F32)?.sqr()?)?;
        }
        loss * self.scale.tensor(scope)?.to_dtype(DType::F32)?.sum_all()?
    }
}

fn input(step: usize, rank: usize) -> Tensor {
    let values: Vec<f32> =
        (0..333).map(|i| ((i * 7 + step * 5 + rank * 3) % 16) as f32 / 64.0 - 0.1).collect();
    Tensor::new(values, &Device::Cpu).unwrap()
}

/// Weights by name, and losses.
type Trace = (Vec<(String, Vec<f32>)>, Vec<f32>);

fn train(ranks: usize, config: &FsdpConfig) -> Vec<Trace> {
    on_ranks(ranks, |world| {
        let mut model = Model::new().fully_shard_with(&world.data_parallel_mesh(), config)?;
        let mut optimizer = model.optimizer_with(AdamW::default().lr(0.01), |spec| match spec.shape[0] {
            7 => ParamGroup::new("short").lr_factor(0.5).weight_decay(0.25),
            _ => ParamGroup::default(),
        })?;
        let mut losses = Vec::new();
        for step in 0..4 {
            let loss: Tensor = model.forward(&input(step, world.rank()))?;
            if config.step_in_backward {
                optimizer.backward_and_step(&mut model, &loss)?;
            } else {
                model.backward(&loss)?;
                optimizer.step(&mut model)?;
            }
            losses.push(loss.to_scalar()?);
        }
        assert_eq!((optimizer.steps(), model.step_count()), (4, 4));
        Ok((weights(&model)?, losses))
    })
}

#[test]
fn gives_the_bits_of_backward_and_step() {
    for strategy in SHARDED {
        for ranks in [1, 2, 3] {
            for precision in [MixedPrecision::F32, MixedPrecision::BF16] {
                for recompute in [Recompute::None, Recompute::Unit] {
                    let apart = FsdpConfig { precision, recompute, ..config(strategy) };
                    let together = FsdpConfig { step_in_backward: true, ..apart.clone() };
                    let (apart, together) = (train(ranks, &apart), train(ranks, &together));
                    assert_eq!(apart, together, "{strategy}, {ranks} ranks, {precision:?}, {recompute:?}");
                    assert!(apart[0].1[0] != apart[0].1[3]);
                }
            }
        }
    }
}

#[test]
fn main_gradients_are_those_of_the_largest_unit_and_gone_afterwards() {
    for strategy in SHARDED {
        for ranks in [1, 2, 4] {
            on_ranks(ranks, |world| {
                let mesh = world.data_parallel_mesh();
                let config = FsdpConfig { step_in_backward: true, ..config(strategy) };
                let mut model = Model::new().fully_shard_with(&mesh, &config)?;
                let mut optimizer = model.optimizer(AdamW::default())?;
                for step in 0..3 {
                    let loss: Tensor = model.forward(&input(step, 0))?;
                    optimizer.backward_and_step(&mut model, &loss)?;
                }
                let memory = model.memory(2);
                let of = |category| memory.iter().find(|report| report.usage.category == category).unwrap();
                let grads = of(Category::MainGrads);
                // 333 elements, padded to 16 a rank.
                let largest = 333usize.next_multiple_of(16 * ranks) / ranks * 4;
                assert_eq!(
                    (grads.usage.current, grads.usage.peak),
                    (0, largest),
                    "{strategy}, {ranks} ranks"
                );
                assert_eq!(grads.formula as usize, largest);
                // What stays otherwise is as much as a state buffer.
                assert!(largest as u64 * 3 < model.memory_plan().optimizer_state * 2);
                let state = of(Category::OptimizerState);
                assert_eq!(state.usage.current as u64, state.formula);
                Ok(())
            });
        }
    }
}

#[test]
fn what_needs_gradients_that_stay_is_refused() {
    on_ranks(2, |world| {
        let mesh = world.data_parallel_mesh();
        let config = FsdpConfig { step_in_backward: true, ..config(Strategy::default()) };
        let mut model = dot(5).fully_shard_with(&mesh, &config)?;
        let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
        let loss: Tensor = model.forward(&vec![full(5, 1.0)])?;
        let refused = [
            model.clip_grad_norm(1.0).unwrap_err(),
            model.grad_norm().unwrap_err(),
            model.visit_gradients(|_, _| Ok(())).unwrap_err(),
            model.backward(&loss).unwrap_err(),
            optimizer.step(&mut model).unwrap_err(),
            LossScaler::default().step(&mut optimizer, &mut model).unwrap_err(),
            model.owner_optimizer(Muon::default(), Sgd::default())?.step(&mut model).unwrap_err(),
        ];
        for error in refused {
            assert!(error.to_string().contains("`optimizer.backward_and_step("), "{error}");
        }
        model.set_is_last_microbatch(false);
        let error = optimizer.backward_and_step(&mut model, &loss).unwrap_err().to_string();
        assert!(error.contains("cannot be accumulated"), "{error}");
        model.set_is_last_microbatch(true);
        // Nothing has happened so far.
        optimizer.backward_and_step(&mut model, &loss)?;
        assert_eq!(weights(&model)?[0].1, [-1.0; 5]);

        let mut plain = dot(5).fully_shard(&mesh)?;
        let mut optimizer = plain.optimizer(Sgd::default())?;
        let error = optimizer.backward_and_step(&mut plain, &loss).unwrap_err().to_string();
        assert!(error.contains("step_in_backward: true"), "{error}");
        let skips = FsdpConfig { non_finite: NonFinite::SkipStep, ..config.clone() };
        let error = dot(5).fully_shard_with(&mesh, &skips).unwrap_err().to_string();
        assert!(error.contains("cannot be used with `NonFinite::SkipStep`"), "{error}");
        for strategy in [Strategy::NoShard, Strategy::Optim] {
            let error =
                dot(5).fully_shard_with(&mesh, &FsdpConfig { strategy, ..config.clone() }).unwrap_err();
            assert!(error.to_string().contains(strategy.name()), "{error}");
        }
        Ok(())
    });
}

#[test]
fn a_unit_without_backward_keeps_weights_and_state() {
    for strategy in SHARDED {
        on_ranks(2, |world| {
            let config = FsdpConfig { step_in_backward: true, ..config(strategy) };
            let mut model =
                crate::fixtures::Two::zeros(5).fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0).momentum(0.5))?;
            for (a, b) in [(true, false), (false, true), (true, true)] {
                let loss: Tensor = model.forward(&(a, b, full(5, 1.0)))?;
                optimizer.backward_and_step(&mut model, &loss)?;
            }
            for (_, weights) in weights(&model)? {
                assert_eq!(weights, [-2.5; 5], "{strategy}");
            }
            Ok(())
        });
    }
}

/// A unit inside a unit that is called twice: recomputed, the inner one has its backward twice.
#[derive(FsdpUnit)]
struct Outer {
    inner: Unit<Dot>,
}

impl Forward for Outer {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.inner.forward(x, &(), scope)
    }
}

#[derive(FsdpUnit)]
struct Twice {
    outer: Unit<Outer>,
}

impl Forward for Twice {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.outer.forward(x, &(), scope)? + self.outer.forward(x, &(), scope)?
    }
}

#[test]
fn gradients_that_come_in_parts_are_stepped_once_with_their_sum() {
    for strategy in SHARDED {
        on_ranks(2, |world| {
            let recompute = Recompute::Unit;
            let config = FsdpConfig { step_in_backward: true, recompute, ..config(strategy) };
            let model = Twice { outer: Unit::new(Outer { inner: Dot::zeros(5) }) };
            let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
            let loss: Tensor = model.forward(&full(5, 1.0))?;
            optimizer.backward_and_step(&mut model, &loss)?;
            assert_eq!(weights(&model)?, named(&[("outer.inner.w", &[-2.0; 5])]));
            assert_eq!(optimizer.steps(), 1);
            Ok(())
        });
    }
}
