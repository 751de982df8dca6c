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

#[test]
fn a_second_synchronised_backward_is_refused_where_it_would_be_wrong() {
    for strategy in [Strategy::NoShard, Strategy::Optim] {
        on_ranks(2, |world| {
            let model = dot(3).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let loss = model.forward(&vec![full(3, 1.0)])?;
            model.backward(&loss)?;
            let loss = model.forward(&vec![full(3, 1.0)])?;
            let error = model.backward(&loss).unwrap_err().to_string();
            assert!(error.contains("no_sync") && error.contains(strategy.name()), "{error}");
            Ok(())
        });
    }
}
