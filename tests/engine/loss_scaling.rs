//! Dynamic loss scaling: one decision on all ranks, and a skipped step that leaves nothing behind.

use candle_core::Tensor;
use fsdp::optim::{LossScalerState, OwnerFn, WholeParam};
use fsdp::prelude::*;

use crate::fixtures::{Dot, Dots, config, dot, full, named, on_ranks, weights};

fn f16(strategy: Strategy) -> FsdpConfig {
    FsdpConfig { precision: MixedPrecision::F16, ..config(strategy) }
}

fn scaler() -> LossScaler {
    LossScaler::default().initial_scale(1024.0).growth_interval(3)
}

/// What a run leaves behind.
type Trace = (Vec<(String, Vec<f32>)>, Vec<bool>, Vec<f64>, u64);

/// Trains on `batches`: the value of all inputs of each microbatch of each step. `bad` steps have a value on the
/// last rank, in their first microbatch, whose scaled gradient is beyond f16.
fn train(ranks: usize, strategy: Strategy, batches: &[(f32, bool)], clip: bool) -> Vec<Trace> {
    on_ranks(ranks, |world| {
        let model = Dots { units: vec![Dot::with(7, 1.0), Dot::with(40, 1.0)] };
        let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &f16(strategy))?;
        let mut optimizer = model.optimizer(AdamW::default().lr(0.125))?;
        let (mut scaler, mut taken, mut scales) = (scaler(), Vec::new(), Vec::new());
        for &(value, bad) in batches {
            for last in [false, true] {
                model.set_is_last_microbatch(last);
                let overflow = bad && !last && world.rank() == ranks - 1;
                let value = if overflow { 60000.0 } else { value };
                let loss: Tensor = model.forward(&vec![full(7, value), full(40, value)])?;
                model.backward(&scaler.scale(&loss)?)?;
            }
            if clip {
                scaler.unscale(&model)?;
                model.clip_grad_norm(0.5)?;
            }
            taken.push(scaler.step(&mut optimizer, &mut model)?);
            scales.push(scaler.current_scale());
        }
        assert_eq!(optimizer.steps(), model.step_count());
        Ok((weights(&model)?, taken, scales, optimizer.steps()))
    })
}

#[test]
fn one_rank_overflows_and_all_skip_as_if_the_batch_had_never_been() {
    for strategy in Strategy::ALL {
        for clip in [false, true] {
            for ranks in [1, 3] {
                let batches = [(0.25, false), (1.0, true), (0.5, false), (-0.125, true), (2.0, false)];
                let kept: Vec<_> = batches.into_iter().filter(|(_, bad)| !bad).collect();
                let expected = train(ranks, strategy, &kept, clip);
                let got = train(ranks, strategy, &batches, clip);
                for ((weights, taken, scales, steps), expected) in got.iter().zip(&expected) {
                    assert_eq!(*taken, [true, false, true, false, true], "{strategy}");
                    assert_eq!(*scales, [1024.0, 512.0, 512.0, 256.0, 256.0]);
                    assert_eq!((weights, *steps), (&expected.0, 3), "{strategy}, {ranks} ranks, clip {clip}");
                }
            }
        }
    }
}

#[test]
fn an_overflow_in_the_very_first_step_is_skipped_too() {
    let got =
        train(2, Strategy::default(), &[(1.0, true), (0.25, false), (0.25, false), (0.25, false)], false);
    let expected = train(2, Strategy::default(), &[(0.25, false); 3], false);
    for ((weights, taken, scales, steps), expected) in got.iter().zip(&expected) {
        assert_eq!(*taken, [false, true, true, true]);
        assert_eq!(*scales, [512.0, 512.0, 512.0, 1024.0]);
        assert_eq!((weights, *steps), (&expected.0, 3));
    }
}

#[test]
fn a_gradient_that_f16_would_lose_survives() {
    // The gradient of `w` is 2^-30: below the smallest f16, 2^-24, until it is scaled.
    let tiny = 2f64.powi(-30);
    on_ranks(2, |world| {
        let mut model = dot(3).fully_shard_with(&world.data_parallel_mesh(), &f16(Strategy::default()))?;
        let mut optimizer = model.optimizer(Sgd::default().lr(2f64.powi(30)))?;
        let loss: Tensor = model.forward(&vec![full(3, 1.0)])?;
        model.backward(&(loss * tiny)?)?;
        assert_eq!(model.grad_norm()?, 0.0);
        optimizer.step(&mut model)?;
        let mut scaler = LossScaler::default().initial_scale(65536.0 * 1024.0);
        let loss: Tensor = model.forward(&vec![full(3, 1.0)])?;
        model.backward(&scaler.scale(&(loss * tiny)?)?)?;
        assert!(scaler.step(&mut optimizer, &mut model)?);
        assert_eq!(weights(&model)?, named(&[("units.0.w", &[-1.0; 3])]));
        Ok(())
    });
}

#[test]
fn norm_and_clipping_are_of_the_unscaled_gradients() {
    for strategy in Strategy::ALL {
        let run = |scaled: bool| {
            on_ranks(4, |world| {
                let model = Dots { units: vec![Dot::zeros(9), Dot::zeros(1)] };
                let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
                let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
                let mut scaler = LossScaler::default();
                let loss: Tensor = model.forward(&vec![full(9, 1.0), full(1, 4.0)])?;
                let norm = if scaled {
                    model.backward(&scaler.scale(&loss)?)?;
                    assert!(scaler.unscale(&model)?);
                    assert_eq!(model.grad_norm()?, 5.0);
                    let norm = model.clip_grad_norm(1.0)?;
                    // Again: the factor stays.
                    assert!(scaler.unscale(&model)?);
                    assert!(scaler.step(&mut optimizer, &mut model)?);
                    norm
                } else {
                    model.backward(&loss)?;
                    let norm = model.clip_grad_norm(1.0)?;
                    optimizer.step(&mut model)?;
                    norm
                };
                Ok((norm, weights(&model)?))
            })
        };
        let (scaled, plain) = (run(true), run(false));
        assert_eq!(scaled[0].0, 5.0, "{strategy}");
        assert_eq!(scaled, plain, "{strategy}");
    }
}

#[test]
fn clipping_scaled_gradients_is_refused() {
    on_ranks(2, |world| {
        let mut model = dot(3).fully_shard(&world.data_parallel_mesh())?;
        let mut optimizer = model.optimizer(Sgd::default())?;
        let mut scaler = LossScaler::default();
        let loss: Tensor = model.forward(&vec![full(3, 1.0)])?;
        model.backward(&scaler.scale(&loss)?)?;
        model.clip_grad_norm(1.0)?;
        let error = scaler.step(&mut optimizer, &mut model).unwrap_err().to_string();
        assert!(error.contains("before `model.clip_grad_norm(..)`"), "{error}");
        Ok(())
    });
}

#[test]
fn a_state_goes_on_where_it_was_taken() {
    let learnt = LossScalerState { scale: 64.0, good_steps: 2, skipped: 5 };
    on_ranks(2, |world| {
        let mut model = dot(3).fully_shard(&world.data_parallel_mesh())?;
        let mut optimizer = model.optimizer(Sgd::default())?;
        let mut scaler = scaler();
        scaler.set_state(learnt);
        let loss: Tensor = model.forward(&vec![full(3, 1.0)])?;
        model.backward(&scaler.scale(&loss)?)?;
        assert!(scaler.step(&mut optimizer, &mut model)?);
        assert_eq!(scaler.state(), LossScalerState { scale: 128.0, good_steps: 0, skipped: 5 });
        Ok(())
    });
}

#[test]
fn ranks_with_different_scales_are_told_apart() {
    on_ranks(2, |world| {
        let mut model = dot(3).fully_shard(&world.data_parallel_mesh())?;
        let mut optimizer = model.optimizer(Sgd::default())?;
        let mut scaler = LossScaler::default().initial_scale(if world.rank() == 0 { 2.0 } else { 4.0 });
        let loss: Tensor = model.forward(&vec![full(3, 1.0)])?;
        model.backward(&scaler.scale(&loss)?)?;
        let error = scaler.step(&mut optimizer, &mut model).unwrap_err().to_string();
        assert!(error.contains("scale: 2.0") && error.contains("scale: 4.0"), "{error}");
        Ok(())
    });
}

#[test]
fn an_owner_step_is_skipped_and_unscaled_alike() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let mut model = dot(6).fully_shard_with(&world.data_parallel_mesh(), &f16(strategy))?;
            let rule = OwnerFn::new(|_, param: &mut WholeParam<'_>| {
                param.weights.iter_mut().zip(param.grads).for_each(|(w, g)| *w -= g);
                Ok(())
            });
            let mut optimizer = model.owner_optimizer(rule, Sgd::default())?;
            let mut scaler = scaler();
            for (value, taken) in [(60000.0, false), (0.5, true)] {
                let value = if world.rank() == 0 { value } else { 0.5 };
                let loss: Tensor = model.forward(&vec![full(6, value)])?;
                model.backward(&scaler.scale(&loss)?)?;
                assert_eq!(scaler.step(&mut optimizer, &mut model)?, taken);
            }
            assert_eq!(weights(&model)?[0].1, [-0.5; 6], "{strategy}");
            Ok(())
        });
    }
}

#[test]
fn ranks_that_hold_no_element_decide_with_the_others() {
    let run = |ranks: usize, strategy: Strategy| {
        on_ranks(ranks, |world| {
            let mut model = dot(2).fully_shard_with(&world.data_parallel_mesh(), &f16(strategy))?;
            let mut optimizer = model.optimizer(AdamW::default().lr(0.125))?;
            let mut scaler = scaler();
            for _ in 0..2 {
                let loss: Tensor = model.forward(&vec![full(2, 0.5)])?;
                model.backward(&scaler.scale(&loss)?)?;
                assert!(scaler.step(&mut optimizer, &mut model)?);
            }
            Ok((scaler.current_scale(), weights(&model)?))
        })
    };
    for strategy in Strategy::ALL {
        let alone = run(1, strategy).remove(0);
        assert_eq!(alone.0, 1024.0);
        // Two elements on four ranks: two ranks have padding only.
        assert!(run(4, strategy).iter().all(|rank| *rank == alone), "{strategy}");
    }
}
