//! The global norm counts every element once, and clips the accumulated gradient once.

use fsdp::prelude::*;
use fsdp_test_support::{absolute, assert_close};

use crate::fixtures::{Dot, Dots, config, dot, full, named, on_ranks, weights};

#[test]
fn each_logical_element_counts_once() {
    // A gradient of norm 3 and one of norm 4 in two units: together 5.
    for strategy in Strategy::ALL {
        let all = on_ranks(4, |world| {
            let model = Dots { units: vec![Dot::zeros(9), Dot::zeros(1)] };
            let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
            let loss = model.forward(&vec![full(9, 1.0), full(1, 4.0)])?;
            model.backward(&loss)?;
            let norm = model.clip_grad_norm(1.0)?;
            optimizer.step(&mut model)?;
            Ok((norm, weights(&model)?))
        });
        for (norm, weights) in all {
            assert_eq!(norm, 5.0, "{strategy}");
            assert_close(&weights[1].1, &vec![-0.8], absolute(1e-6), strategy);
        }
    }
}

#[test]
fn clipping_is_of_the_accumulated_gradient() {
    for strategy in Strategy::ALL {
        let all = on_ranks(2, |world| {
            let mut model = dot(1).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
            for (x, last) in [(3.0, false), (-1.0, true)] {
                model.set_is_last_microbatch(last);
                let loss = model.forward(&vec![full(1, x)])?;
                model.backward(&loss)?;
            }
            let norm = model.clip_grad_norm(1.0)?;
            optimizer.step(&mut model)?;
            Ok((norm, weights(&model)?))
        });
        assert_eq!(all[0].0, 2.0, "{strategy}");
        for (_, weights) in all {
            assert_close(&weights[0].1, &vec![-1.0], absolute(1e-6), strategy);
        }
    }
}

#[test]
fn padding_never_reaches_the_norm_even_when_buffers_were_poisoned() {
    for strategy in Strategy::ALL {
        for double_buffer in [true, false] {
            let all = on_ranks(4, |world| {
                let config = FsdpConfig { double_buffer, ..config(strategy) };
                let mut model = dot(10).fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let mut optimizer = model.optimizer(AdamW::default().weight_decay(0.0))?;
                let mut norms = Vec::new();
                for _ in 0..3 {
                    let loss = model.forward(&vec![full(10, 1.0)])?;
                    model.backward(&loss)?;
                    norms.push(model.clip_grad_norm(1.0)?);
                    optimizer.step(&mut model)?;
                }
                Ok((norms, weights(&model)?))
            });
            for (norms, weights) in all {
                assert!(norms.iter().all(|norm| *norm == 10f64.sqrt()), "{strategy}: {norms:?}");
                assert_eq!(weights[0].1.len(), 10);
                assert!(weights[0].1.iter().all(|value| value.is_finite()));
            }
        }
    }
}

#[test]
fn a_gradient_within_the_bound_is_left_alone() {
    let all = on_ranks(2, |world| {
        let mut model = dot(1).fully_shard(&world.data_parallel_mesh())?;
        let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
        let loss = model.forward(&vec![full(1, 0.5)])?;
        model.backward(&loss)?;
        model.clip_grad_norm(1.0)?;
        optimizer.step(&mut model)?;
        weights(&model)
    });
    assert_eq!(all[1], named(&[("units.0.w", &[-0.5])]));
}

#[test]
fn a_bound_that_is_no_positive_number_is_refused() {
    on_ranks(1, |world| {
        let model = dot(1).fully_shard(&world.data_parallel_mesh())?;
        for bound in [0.0, -1.0, f64::NAN] {
            let error = model.clip_grad_norm(bound).unwrap_err().to_string();
            assert!(error.contains("must be positive"), "{error}");
        }
        Ok(())
    });
}

/// A model of one weight after a backward of gradient 4, a clipping to 1, and another backward of gradient 4.
fn clipped_between_two_backwards<T: Send>(
    then: impl Fn(&mut Fsdp<Dots>, &mut ShardedOptimizer<Sgd>) -> fsdp::Result<T> + Send + Sync,
) -> T {
    let all = on_ranks(2, |world| {
        let mut model = dot(1).fully_shard(&world.data_parallel_mesh())?;
        let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
        for clips in [true, false] {
            let loss = model.forward(&vec![full(1, 4.0)])?;
            model.backward(&loss)?;
            if clips {
                model.clip_grad_norm(1.0)?;
            }
        }
        then(&mut model, &mut optimizer)
    });
    all.into_iter().next().unwrap()
}

#[test]
fn a_clipping_is_of_the_gradients_that_there_were() {
    let after = clipped_between_two_backwards(|model, optimizer| {
        optimizer.step(model)?;
        weights(model)
    });
    assert_eq!(after, named(&[("units.0.w", &[-8.0])]));
}

#[test]
fn the_norm_after_another_backward_is_that_of_the_sum() {
    assert_eq!(clipped_between_two_backwards(|model, _| model.grad_norm()), 8.0);
}
