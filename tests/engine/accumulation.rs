//! Microbatches are summed, ranks are averaged, each contribution once.

use fsdp::prelude::*;

use crate::fixtures::{Dot, Dots, config, dot, full, gradients, named, on_ranks, weights};

/// Gradient of w after `batches`, the last of them synchronised.
fn accumulated(ranks: usize, strategy: Strategy, batches: &[f32]) -> Vec<f32> {
    let all = on_ranks(ranks, |world| {
        let model = dot(3).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
        for (index, &x) in batches.iter().enumerate() {
            model.set_is_last_microbatch(index + 1 == batches.len());
            let loss = model.forward(&vec![full(3, x)])?;
            model.backward(&loss)?;
        }
        gradients(&model)
    });
    assert!(all.iter().all(|gradients| *gradients == all[0]), "ranks differ: {all:?}");
    all[0][0].1.clone()
}

#[test]
fn each_contribution_is_averaged_once_before_it_is_accumulated() {
    for strategy in Strategy::ALL {
        assert_eq!(accumulated(2, strategy, &[8.0]), [8.0; 3], "{strategy}");
        assert_eq!(accumulated(2, strategy, &[8.0; 4]), [32.0; 3], "{strategy}");
        assert_eq!(accumulated(1, strategy, &[8.0; 4]), [32.0; 3], "{strategy}");
    }
}

#[test]
fn units_that_share_a_scratch_bucket_each_keep_their_sum() {
    for ranks in [1, 2] {
        for strategy in Strategy::ALL {
            let all = on_ranks(ranks, |world| {
                let model = Dots { units: (0..4).map(|_| Dot::zeros(3)).collect() };
                let model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
                for (index, x) in [1.0, 10.0, 100.0].into_iter().enumerate() {
                    model.set_is_last_microbatch(index == 2);
                    let loss = model.forward(&vec![full(3, x); 4])?;
                    model.backward(&loss)?;
                }
                gradients(&model)
            });
            for (name, gradient) in &all[0] {
                assert_eq!(gradient, &[111.0; 3], "{name}, {strategy}, {ranks} ranks");
            }
        }
    }
}

#[test]
fn duplicating_the_batch_on_more_ranks_changes_nothing() {
    for ranks in 1..=4 {
        for strategy in Strategy::ALL {
            let all = on_ranks(ranks, |world| {
                let mut model = dot(3).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
                let mut optimizer = model.optimizer(Sgd::default().lr(0.5).weight_decay(0.0))?;
                let loss = model.forward(&vec![full(3, 2.0)])?;
                model.backward(&loss)?;
                optimizer.step(&mut model)?;
                weights(&model)
            });
            assert_eq!(all[0], named(&[("units.0.w", &[-1.0; 3])]), "{strategy}, {ranks} ranks");
        }
    }
}

#[test]
fn gradients_are_the_mean_or_the_sum_over_ranks() {
    for (scaling, expected) in [(fsdp::GradientScaling::Mean, 1.0), (fsdp::GradientScaling::Sum, 3.0)] {
        for strategy in Strategy::ALL {
            let all = on_ranks(3, |world| {
                let config = FsdpConfig { scaling, ..config(strategy) };
                let model = dot(5).fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let loss = model.forward(&vec![full(5, world.rank() as f32)])?;
                model.backward(&loss)?;
                gradients(&model)
            });
            assert_eq!(all[2], named(&[("units.0.w", &[expected; 5])]), "{strategy}");
        }
    }
}

#[test]
fn no_sync_lasts_as_long_as_its_guard() {
    for strategy in Strategy::ALL {
        let all = on_ranks(2, |world| {
            let model = dot(3).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            {
                let _guard = model.no_sync();
                let loss = model.forward(&vec![full(3, 1.0 + world.rank() as f32)])?;
                model.backward(&loss)?;
            }
            let loss = model.forward(&vec![full(3, 10.0)])?;
            model.backward(&loss)?;
            gradients(&model)
        });
        assert_eq!(all[0], named(&[("units.0.w", &[11.5; 3])]), "{strategy}");
    }
}

#[test]
fn a_step_reduces_what_no_microbatch_has() {
    for strategy in Strategy::ALL {
        let all = on_ranks(2, |world| {
            let mut model = dot(3).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
            for _ in 0..2 {
                let _unsynced = model.no_sync();
                let loss = model.forward(&vec![full(3, 1.0 + world.rank() as f32)])?;
                model.backward(&loss)?;
            }
            optimizer.step(&mut model)?;
            weights(&model)
        });
        assert!(all.iter().all(|weights| *weights == named(&[("units.0.w", &[-3.0; 3])])), "{strategy}");
    }
}

/// How a step's earlier microbatches are run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Earlier {
    /// Like the last one.
    Alike,
    NotLast,
}

/// The gradient, one value, of microbatches that bring these, reduced in 16 bits into f32.
fn reduced_in(
    reduce: Dtype,
    strategy: Strategy,
    ranks: usize,
    n: usize,
    run: Earlier,
    batches: &[f32],
) -> f32 {
    let all = on_ranks(ranks, |world| {
        let precision = MixedPrecision { reduce, main_grads: Dtype::F32, ..MixedPrecision::F32 };
        let config = FsdpConfig { precision, ..config(strategy) };
        let model = dot(n).fully_shard_with(&world.data_parallel_mesh(), &config)?;
        for (index, &x) in batches.iter().enumerate() {
            model.set_is_last_microbatch(run == Earlier::Alike || index + 1 == batches.len());
            let loss = model.forward(&vec![full(n, x)])?;
            model.backward(&loss)?;
        }
        Ok(gradients(&model)?.swap_remove(0).1)
    });
    let first = all[0][0];
    assert!(all.iter().flatten().all(|&value| value == first), "{strategy}, {ranks} ranks: {all:?}");
    first
}

/// Sums that 16 bits cannot hold, of contributions that they can: the sum is what is kept in f32.
fn narrow_sums() -> Vec<(usize, Vec<f32>, f32)> {
    let around = |large: f32| [vec![large], vec![1.0; 8], vec![-large]].concat();
    vec![
        (1, vec![1.0; 200], 200.0),
        (1000, vec![1.0; 200], 200.0),
        (3, vec![1.0; 300], 300.0),
        (3, around(512.0), 8.0),
        (1000, around(4096.0), 8.0),
    ]
}

#[test]
fn a_narrow_reduction_rounds_what_a_microbatch_brings_and_not_the_sum() {
    for reduce in [Dtype::BF16, Dtype::F16] {
        for strategy in [Strategy::OptimGrads, Strategy::OptimGradsParams] {
            for ranks in [1, 2] {
                for (n, batches, expected) in narrow_sums() {
                    for run in [Earlier::Alike, Earlier::NotLast] {
                        let found = reduced_in(reduce, strategy, ranks, n, run, &batches);
                        assert_eq!(found, expected, "{reduce}, {strategy}, {ranks} ranks, {n}, {run:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_million_elements_are_summed_over_many_microbatches_while_they_are_reduced() {
    let found = reduced_in(Dtype::BF16, Strategy::default(), 1, 1_000_000, Earlier::Alike, &[1.0; 300]);
    assert_eq!(found, 300.0);
}

#[test]
fn gradients_that_are_reduced_once_a_step_are_rounded_once() {
    for reduce in [Dtype::BF16, Dtype::F16] {
        for strategy in [Strategy::NoShard, Strategy::Optim] {
            for ranks in [1, 2] {
                for (n, batches, expected) in narrow_sums() {
                    let found = reduced_in(reduce, strategy, ranks, n, Earlier::NotLast, &batches);
                    assert_eq!(found, expected, "{reduce}, {strategy}, {ranks} ranks, {n}");
                }
            }
        }
    }
}

#[test]
fn a_second_synchronised_backward_is_refused_where_it_would_be_wrong() {
    for strategy in [Strategy::NoShard, Strategy::Optim] {
        for (ranks, reduce) in [(1, Dtype::F32), (1, Dtype::BF16), (2, Dtype::F32)] {
            on_ranks(ranks, |world| {
                let precision = MixedPrecision { reduce, ..MixedPrecision::F32 };
                let config = FsdpConfig { precision, ..config(strategy) };
                let model = dot(3).fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let loss = model.forward(&vec![full(3, 1.0)])?;
                model.backward(&loss)?;
                let loss = model.forward(&vec![full(3, 1.0)])?;
                let error = model.backward(&loss).unwrap_err().to_string();
                assert!(error.contains("no_sync") && error.contains(strategy.name()), "{error}");
                assert_eq!(gradients(&model)?, named(&[("units.0.w", &[1.0; 3])]));
                Ok(())
            });
        }
    }
}

#[test]
fn the_refusal_of_a_second_backward_speaks_of_what_was_chosen() {
    for (outer, inner) in [(2, 1), (2, 2), (3, 1)] {
        for strategy in [Strategy::OptimGradsParams, Strategy::OptimGrads] {
            on_ranks(outer * inner, |world| {
                let mesh = world.mesh(&[("dp_outer", outer), ("dp_shard", inner)])?;
                let model = dot(3).fully_shard_with(&mesh, &config(strategy))?;
                let loss = model.forward(&vec![full(3, 1.0)])?;
                model.backward(&loss)?;
                let loss = model.forward(&vec![full(3, 1.0)])?;
                let error = model.backward(&loss).unwrap_err().to_string();
                assert!(
                    error.contains(&format!("with {outer} ranks of `dp_outer` the gradients")),
                    "{error}"
                );
                assert!(!error.contains("strategy"), "{error}");
                Ok(())
            });
        }
    }
}
