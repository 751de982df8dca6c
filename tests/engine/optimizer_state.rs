//! The optimizer's state: inert at birth, sharded, tied to its model.

use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::Tensor;
use fsdp::memory::Category;
use fsdp::optim::{OptimError, Optimizer, Segment, StepInfo};
use fsdp::prelude::*;
use fsdp_test_support::{absolute, assert_close, assert_each_close, relative};

use crate::fixtures::{Dot, Dots, Two, config, dot, full, on_ranks, weights};

fn one_dot(value: f32) -> Dots {
    Dots { units: vec![Dot::with(4, value)] }
}

#[test]
fn making_state_is_inert() {
    for strategy in Strategy::ALL {
        for (decay, expected) in [(0.0, 1e-3f32), (0.1, 1.1e-3)] {
            on_ranks(2, |world| {
                let mut model =
                    one_dot(1.0).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
                let mut optimizer = model.optimizer(AdamW::default().lr(1e-3).weight_decay(decay))?;
                assert_eq!((optimizer.steps(), weights(&model)?[0].1.clone()), (0, vec![1.0; 4]));
                let loss: Tensor = model.forward(&vec![full(4, 2.0)])?;
                model.backward(&loss)?;
                optimizer.step(&mut model)?;
                assert_eq!(optimizer.steps(), 1);
                let changes: Vec<f32> = weights(&model)?[0].1.iter().map(|weight| 1.0 - weight).collect();
                assert_close(&changes, &vec![expected; 4], relative(1e-4), strategy);
                Ok(())
            });
        }
    }
}

#[test]
fn an_optimizer_made_at_any_time_trains() {
    on_ranks(2, |world| {
        let mut model = dot(3).fully_shard(&world.data_parallel_mesh())?;
        let _: Tensor = model.evaluate(&vec![full(3, 1.0)])?;
        let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
        let loss: Tensor = model.forward(&vec![full(3, 1.0)])?;
        model.backward(&loss)?;
        optimizer.step(&mut model)?;
        assert_eq!(weights(&model)?[0].1, [-1.0; 3]);
        Ok(())
    });
}

#[test]
fn an_optimizer_of_another_model_is_refused() {
    on_ranks(1, |world| {
        let mesh = world.data_parallel_mesh();
        let mut optimizer = dot(3).fully_shard(&mesh)?.optimizer(Sgd::default())?;
        let error = optimizer.step(&mut dot(3).fully_shard(&mesh)?).unwrap_err().to_string();
        assert!(error.contains("another model"), "{error}");
        Ok(())
    });
}

#[test]
fn settings_out_of_range_are_named() {
    on_ranks(1, |world| {
        let model = dot(3).fully_shard(&world.data_parallel_mesh())?;
        let error = model.optimizer(AdamW::default().betas(1.5, 0.9)).unwrap_err().to_string();
        assert!(error.contains("1.5"), "{error}");
        Ok(())
    });
}

/// Counts the calls of a rule, and leaves the weights alone.
#[derive(Default)]
struct Counting {
    calls: AtomicUsize,
}

impl Optimizer for Counting {
    fn name(&self) -> &'static str {
        "counting"
    }

    fn state_names(&self) -> &'static [&'static str] {
        &[]
    }

    fn update(&self, _: StepInfo, _: &mut Segment<'_>) {
        self.calls.fetch_add(1, Ordering::Relaxed);
    }

    fn learning_rate(&self) -> f64 {
        0.0
    }

    fn set_learning_rate(&mut self, _: f64) {}

    fn validate(&self) -> Result<(), OptimError> {
        Ok(())
    }
}

#[test]
fn a_rule_runs_once_a_parameter_and_step_however_many_microbatches() {
    for strategy in Strategy::ALL {
        let calls = on_ranks(2, |world| {
            let model = Dots { units: vec![Dot::zeros(40), Dot::zeros(40)] };
            let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(Counting::default())?;
            for _ in 0..2 {
                for microbatch in 0..4 {
                    model.set_is_last_microbatch(microbatch == 3);
                    let loss: Tensor = model.forward(&vec![full(40, 1.0); 2])?;
                    model.backward(&loss)?;
                }
                optimizer.step(&mut model)?;
            }
            Ok(optimizer.rule().calls.load(Ordering::Relaxed))
        });
        assert_eq!(calls, [4, 4], "{strategy}");
    }
}

#[test]
fn state_is_allocated_for_the_shard() {
    on_ranks(4, |world| {
        let model = dot(1_000_000).fully_shard(&world.data_parallel_mesh())?;
        let optimizer = model.optimizer(AdamW::default())?;
        let state =
            model.memory(2).into_iter().find(|m| m.usage.category == Category::OptimizerState).unwrap();
        // 250,000 elements are whole cache lines already.
        assert_eq!((state.usage.current, state.formula), (2_000_000, 2_000_000));
        drop(optimizer);
        Ok(())
    });
}

#[test]
fn the_first_forward_after_a_step_sees_the_new_weights() {
    for strategy in Strategy::ALL {
        for precision in [MixedPrecision::default(), MixedPrecision::BF16] {
            on_ranks(2, |world| {
                let config = FsdpConfig { precision, prefetch: 2, ..config(strategy) };
                let model = Dots { units: (0..3).map(|_| Dot::with(1, 1.0)).collect() };
                let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
                for expected in [3.0, 6.0, 9.0] {
                    for _ in 0..2 {
                        let loss: Tensor = model.evaluate(&vec![full(1, 1.0); 3])?;
                        assert_eq!(loss.to_scalar::<f32>()?, expected, "{strategy}");
                    }
                    for last in [false, true] {
                        model.set_is_last_microbatch(last);
                        let loss: Tensor = model.forward(&vec![full(1, -0.5); 3])?;
                        assert_eq!(loss.to_scalar::<f32>()?, -expected / 2.0, "{strategy}");
                        model.backward(&loss)?;
                    }
                    optimizer.step(&mut model)?;
                }
                Ok(())
            });
        }
    }
}

#[test]
fn a_forward_without_backward_does_not_keep_old_root_weights() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let dot = Dot { w: Param::new(3).with_init(Init::Zeros) };
            let mut model = dot.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
            let loss: Tensor = model.forward(&full(3, 1.0))?;
            model.backward(&loss)?;
            let unused: Tensor = model.forward(&full(3, 1.0))?;
            optimizer.step(&mut model)?;
            let error = model.backward(&unused).unwrap_err().to_string();
            assert!(error.contains("weights have changed"), "{error}");
            let loss: Tensor = model.forward(&full(3, 1.0))?;
            assert_eq!(loss.to_scalar::<f32>()?, -3.0, "{strategy}");
            model.backward(&loss)?;
            let _unused: Tensor = model.forward(&full(3, 1.0))?;
            model.load_weights(|_, _, values| {
                values.fill(5.0);
                Ok(())
            })?;
            let loss: Tensor = model.evaluate(&full(3, 1.0))?;
            assert_eq!(loss.to_scalar::<f32>()?, 15.0, "{strategy}");
            let error = model.backward(&full(1, 1.0)).unwrap_err().to_string();
            assert!(error.contains("weights have changed"), "{error}");
            Ok(())
        });
    }
}

#[test]
fn a_unit_that_comes_late_takes_its_first_step_as_if_it_were_the_first() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let mut model = Two::zeros(3).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(AdamW::default().lr(0.125).weight_decay(0.0))?;
            for step in 0..20 {
                let loss: Tensor = model.forward(&(true, step == 19, full(3, 1.0)))?;
                model.backward(&loss)?;
                optimizer.step(&mut model)?;
            }
            let all = weights(&model)?;
            let late = &all.iter().find(|(name, _)| name == "b.w").unwrap().1;
            // The first step of Adam moves by the learning rate.
            assert_each_close(late, -0.125, absolute(1e-6), strategy);
            Ok(())
        });
    }
}

#[test]
fn a_unit_that_pauses_goes_on_where_it_was() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let mut model = Two::zeros(3).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(AdamW::default().lr(0.125).weight_decay(0.0))?;
            for used in [true, false, false, true] {
                let loss: Tensor = model.forward(&(true, used, full(3, 1.0)))?;
                model.backward(&loss)?;
                optimizer.step(&mut model)?;
            }
            let all = weights(&model)?;
            let paused = &all.iter().find(|(name, _)| name == "b.w").unwrap().1;
            // With equal gradients the corrected moments are the gradient and its square: each step moves by the rate.
            assert_each_close(paused, -0.25, absolute(1e-6), strategy);
            Ok(())
        });
    }
}
