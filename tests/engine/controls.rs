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
fn factors_that_are_none_in_f32_are_refused_and_nothing_is_scaled() {
    on_ranks(2, |world| {
        let model = dot(4).fully_shard(&world.data_parallel_mesh())?;
        backward(&model, 4, 8.0)?;
        // Zero times an infinity would be NaN, and what rounds to zero would forget the gradients.
        for factor in [1e300, -1e39, 1e-300, f64::INFINITY] {
            let error = model.scale_gradients(factor).unwrap_err().to_string();
            assert!(error.contains("factor that f32 holds"), "{error}");
        }
        assert_eq!(gradients(&model)?[0].1, [8.0; 4]);
        model.scale_gradients(0.0)?;
        assert_eq!(gradients(&model)?[0].1, [0.0; 4]);
        Ok(())
    });
}

/// Sums over ranks so far.
fn reductions(model: &Fsdp<Dots>) -> u64 {
    let sums = model.traffic().into_iter();
    let sums = sums.filter(|kind| ["reduce-scatter", "all-reduce"].contains(&kind.operation));
    sums.map(|kind| kind.counter.calls).sum()
}

#[test]
fn guards_of_no_sync_end_in_any_order() {
    for strategy in [Strategy::OptimGrads, Strategy::OptimGradsParams] {
        on_ranks(2, |world| {
            let mut model = dot(3).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
            let (first, second) = (model.no_sync(), model.no_sync());
            drop(first);
            backward(&model, 3, 1.0)?;
            drop(second);
            backward(&model, 3, 2.0)?;
            backward(&model, 3, 4.0)?;
            optimizer.step(&mut model)?;
            // That of the first two microbatches, and that of the third.
            assert_eq!(reductions(&model), 2, "{strategy}");
            assert_eq!(weights(&model)?[0].1, [-7.0; 3]);
            Ok(())
        });
    }
}

#[test]
fn a_guard_of_no_sync_counts_before_the_last_microbatch_which_counts_after_it() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let mut model = dot(3).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
            let guard = model.no_sync();
            model.set_is_last_microbatch(true);
            backward(&model, 3, 1.0)?;
            model.set_is_last_microbatch(false);
            backward(&model, 3, 2.0)?;
            drop(guard);
            backward(&model, 3, 4.0)?;
            model.set_is_last_microbatch(true);
            backward(&model, 3, 8.0)?;
            optimizer.step(&mut model)?;
            let expected = if strategy.shards_grads() { 2 } else { 1 };
            assert_eq!(reductions(&model), expected, "{strategy}");
            assert_eq!(weights(&model)?[0].1, [-15.0; 3], "{strategy}");
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
