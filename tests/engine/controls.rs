//! What a training loop may do to the gradients of a step: forget them, scale them, set what they are divided by.

use candle_core::Tensor;
use fsdp::prelude::*;
use fsdp_test_support::{assert_close, relative};

use crate::fixtures::{Dots, config, dot, full, gradients, named, on_ranks, weights};

fn backward(model: &Fsdp<Dots>, n: usize, x: f32) -> fsdp::Result<()> {
    let loss: Tensor = model.forward(&vec![full(n, x)])?;
    model.backward(&loss)
}

#[test]
fn zeroed_gradients_are_gone_and_forwards_before_stay_good() {
    for strategy in Strategy::ALL {
        for held_back in [false, true] {
            on_ranks(2, |world| {
                let mut model = dot(3).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
                let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
                let guard = held_back.then(|| model.no_sync());
                backward(&model, 3, 100.0)?;
                drop(guard);
                let loss: Tensor = model.forward(&vec![full(3, 2.0)])?;
                model.zero_grad()?;
                let error = optimizer.step(&mut model).unwrap_err().to_string();
                assert!(error.contains("no backward of model `Dots`"), "{error}");
                assert_eq!(gradients(&model)?, []);
                model.backward(&loss)?;
                assert_eq!(gradients(&model)?, named(&[("units.0.w", &[2.0; 3])]), "{strategy}, {held_back}");
                optimizer.step(&mut model)?;
                // With nothing to forget it does nothing.
                model.zero_grad()?;
                backward(&model, 3, 1.0)?;
                optimizer.step(&mut model)?;
                assert_eq!(weights(&model)?, named(&[("units.0.w", &[-3.0; 3])]));
                Ok(())
            });
        }
    }
}

#[test]
fn gradients_are_scaled_as_they_are_and_later_ones_are_not() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let mut model = dot(4).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
            backward(&model, 4, 8.0)?;
            assert_eq!(model.grad_norm()?, 16.0);
            model.scale_gradients(0.25)?;
            assert_eq!(gradients(&model)?[0].1, [2.0; 4]);
            assert_eq!(model.grad_norm()?, 4.0);
            if strategy.shards_grads() {
                backward(&model, 4, 1.0)?;
                model.scale_gradients(-2.0)?;
                assert_eq!(gradients(&model)?[0].1, [-6.0; 4]);
                model.scale_gradients(-1.0 / 3.0)?;
            }
            optimizer.step(&mut model)?;
            assert_eq!(weights(&model)?[0].1, [-2.0; 4], "{strategy}");
            assert!(model.scale_gradients(f64::NAN).unwrap_err().to_string().contains("not by NaN"));
            Ok(())
        });
    }
}

#[test]
fn a_backward_after_a_call_that_has_reduced_says_which_calls_reduce() {
    for strategy in [Strategy::NoShard, Strategy::Optim] {
        on_ranks(2, |world| {
            let mut model = dot(4).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
            let guard = model.no_sync();
            backward(&model, 4, 1.0)?;
            drop(guard);
            model.scale_gradients(2.0)?;
            let error = backward(&model, 4, 1.0).unwrap_err().to_string();
            for part in [strategy.name(), "by a call that needs them", "`scale_gradients`", "after the last"]
            {
                assert!(error.contains(part), "`{part}` is not in: {error}");
            }
            // What was refused has added nothing.
            optimizer.step(&mut model)?;
            assert_eq!(weights(&model)?[0].1, [-2.0; 4], "{strategy}");
            Ok(())
        });
    }
}

#[test]
fn gradients_are_divided_by_what_is_said() {
    for (outer, inner) in [(1, 3), (2, 2), (3, 1), (1, 1)] {
        let ranks = outer * inner;
        // The ranks bring 0, 1, 2, ..
        let sum = (ranks * (ranks - 1) / 2) as f32;
        for scaling in [GradientScaling::Mean, GradientScaling::Sum] {
            let own = if scaling == GradientScaling::Mean { ranks as f32 } else { 1.0 };
            for strategy in Strategy::ALL {
                on_ranks(ranks, |world| {
                    let mesh = world.mesh(&[("dp_outer", outer), ("dp_shard", inner)])?;
                    let config = FsdpConfig { scaling, ..config(strategy) };
                    let model = dot(5).fully_shard_with(&mesh, &config)?;
                    for (factor, by) in [(None, own), (Some(2.0), 2.0), (Some(0.5), 0.5), (None, own)] {
                        model.set_gradient_divide_factor(factor)?;
                        backward(&model, 5, world.rank() as f32)?;
                        let gradient = &gradients(&model)?[0].1;
                        let what = format!("{by}, {strategy}");
                        assert_close(gradient, &vec![sum / by; 5], relative(1e-6), what);
                        let error = model.set_gradient_divide_factor(None).unwrap_err().to_string();
                        assert!(error.contains("before the first backward of a step"), "{error}");
                        model.zero_grad()?;
                    }
                    for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY] {
                        let error = model.set_gradient_divide_factor(Some(wrong)).unwrap_err().to_string();
                        assert!(error.contains("positive and finite"), "{error}");
                    }
                    Ok(())
                });
            }
        }
    }
}
