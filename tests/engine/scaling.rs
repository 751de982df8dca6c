//! How the contributions of ranks and microbatches are combined.

use candle_core::Tensor;
use fsdp::prelude::*;
use fsdp_test_support::{assert_close, relative};

use crate::fixtures::{config, dot, full, gradients, named, on_ranks, weights};

fn per_token(strategy: Strategy) -> FsdpConfig {
    FsdpConfig { scaling: GradientScaling::PerToken, ..config(strategy) }
}

#[test]
fn the_same_batch_on_more_ranks_changes_nothing() {
    for ranks in [1, 2, 3, 4] {
        for strategy in Strategy::ALL {
            on_ranks(ranks, |world| {
                let mut model = dot(3).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
                let mut optimizer = model.optimizer(Sgd::default().lr(0.5))?;
                let loss: Tensor = model.forward(&vec![full(3, 2.0)])?;
                model.backward(&loss)?;
                optimizer.step(&mut model)?;
                assert_eq!(weights(&model)?, named(&[("units.0.w", &[-1.0; 3])]));
                Ok(())
            });
        }
    }
}

#[test]
fn the_mean_of_a_loss_is_that_over_all_ranks() {
    on_ranks(4, |world| {
        let model = dot(3).fully_shard(&world.mesh(&[("dp_outer", 2), ("dp_shard", 2)])?)?;
        let losses = [1.0, 2.0, 3.0, 6.5];
        assert_eq!(model.mean_over_ranks(losses[world.rank()])?, 3.125);
        let one_is_lost = if world.rank() == 2 { f64::NAN } else { 1.0 };
        assert!(model.mean_over_ranks(one_is_lost)?.is_nan());
        Ok(())
    });
    on_ranks(1, |world| {
        let model = dot(3).fully_shard(&world.data_parallel_mesh())?;
        assert_eq!(model.mean_over_ranks(0.7)?, 0.7);
        Ok(())
    });
}

#[test]
fn sums_are_sums() {
    for strategy in Strategy::ALL {
        on_ranks(3, |world| {
            let config = FsdpConfig { scaling: GradientScaling::Sum, ..config(strategy) };
            let model = dot(3).fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let loss: Tensor = model.forward(&vec![full(3, 1.0 + world.rank() as f32)])?;
            model.backward(&loss)?;
            assert_eq!(gradients(&model)?, named(&[("units.0.w", &[6.0; 3])]));
            Ok(())
        });
    }
}

#[test]
fn a_rank_without_valid_tokens_adds_nothing() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let mut model = dot(1).fully_shard_with(&world.data_parallel_mesh(), &per_token(strategy))?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
            // Rank 1 has two tokens with gradients 4 and 6.
            let (sum, tokens) = [(0.0, 0), (4.0 + 6.0, 2)][world.rank()];
            let loss: Tensor = model.forward(&vec![full(1, sum)])?;
            model.backward_tokens(&loss, tokens)?;
            assert_eq!(model.grad_norm()?, 5.0);
            assert_eq!(gradients(&model)?, named(&[("units.0.w", &[5.0])]));
            optimizer.step(&mut model)?;
            // In the second step nobody has any.
            let loss: Tensor = model.forward(&vec![full(1, 0.0)])?;
            model.backward_tokens(&loss, 0)?;
            let text = optimizer.step(&mut model).unwrap_err().to_string();
            assert!(text.contains("global valid token count is 0"), "{text}");
            model.reset_step()?;
            assert_eq!(weights(&model)?, named(&[("units.0.w", &[-5.0])]));
            let loss: Tensor = model.forward(&vec![full(1, 3.0)])?;
            model.backward_tokens(&loss, 1)?;
            optimizer.step(&mut model)?;
            assert_eq!(weights(&model)?, named(&[("units.0.w", &[-8.0])]));
            assert_eq!((model.step_count(), optimizer.steps()), (2, 2));
            Ok(())
        });
    }
}

#[test]
fn every_token_counts_the_same_over_ranks_microbatches_and_outer_ranks() {
    for (outer, inner) in [(1, 2), (2, 1), (2, 2)] {
        for strategy in Strategy::ALL {
            on_ranks(outer * inner, |world| {
                let mesh = world.mesh(&[("dp_outer", outer), ("dp_shard", inner)])?;
                let model = dot(4).fully_shard_with(&mesh, &per_token(strategy))?;
                // Rank r has r + m tokens in microbatch m, all of gradient 1 + r.
                let (mut sum, mut count) = (0.0, 0.0);
                for microbatch in 0..3 {
                    for rank in 0..world.size() {
                        sum += ((rank + microbatch) * (1 + rank)) as f32;
                        count += (rank + microbatch) as f32;
                    }
                    model.set_is_last_microbatch(microbatch == 2);
                    let (rank, tokens) = (world.rank(), world.rank() + microbatch);
                    let loss: Tensor = model.forward(&vec![full(4, (tokens * (1 + rank)) as f32)])?;
                    model.backward_tokens(&loss, tokens as u64)?;
                }
                let (name, values) = &gradients(&model)?[0];
                assert_eq!(name, "units.0.w");
                assert_close(values, &vec![sum / count; 4], relative(1e-6), format!("{sum} of {count}"));
                let text =
                    model.forward(&vec![full(4, 1.0)]).and_then(|loss| model.backward_tokens(&loss, 1));
                let text = text.unwrap_err().to_string();
                assert!(text.contains("divided by its tokens already") || text.contains("no_sync"), "{text}");
                Ok(())
            });
        }
    }
}

#[test]
fn a_scaling_is_not_taken_for_another() {
    on_ranks(1, |world| {
        let mesh = world.data_parallel_mesh();
        let model = dot(1).fully_shard_with(&mesh, &per_token(Strategy::default()))?;
        let loss: Tensor = model.forward(&vec![full(1, 1.0)])?;
        let text = model.backward(&loss).unwrap_err().to_string();
        assert!(text.contains("call `backward_tokens`"), "{text}");
        let model = dot(1).fully_shard(&mesh)?;
        let loss: Tensor = model.forward(&vec![full(1, 1.0)])?;
        let text = model.backward_tokens(&loss, 1).unwrap_err().to_string();
        assert!(text.contains("`Mean`") && text.contains("call `backward`"), "{text}");
        Ok(())
    });
}

#[test]
fn ranks_whose_batches_run_out_go_on_with_the_others() {
    for strategy in Strategy::ALL {
        on_ranks(3, |world| {
            let mut model = dot(2).fully_shard_with(&world.data_parallel_mesh(), &per_token(strategy))?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
            // Rank r has r + 1 batches, of one token each with gradient 6.
            let mut batches = (0..=world.rank()).map(|_| full(2, 6.0));
            loop {
                let batch = batches.next();
                if !model.join(batch.is_some())? {
                    break;
                }
                let tokens = u64::from(batch.is_some());
                let loss: Tensor = model.forward(&vec![batch.unwrap_or(full(2, 0.0))])?;
                model.backward_tokens(&loss, tokens)?;
                optimizer.step(&mut model)?;
            }
            assert_eq!(model.step_count(), 3);
            assert_eq!(weights(&model)?, named(&[("units.0.w", &[-18.0; 2])]));
            Ok(())
        });
    }
}

#[test]
fn tokens_of_a_backward_that_failed_do_not_count() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let mut model = dot(2).fully_shard_with(&world.data_parallel_mesh(), &per_token(strategy))?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
            assert!(model.backward_tokens(&full(1, 1.0), 50).is_err());
            let loss: Tensor = model.forward(&vec![full(2, 3.0)])?;
            assert!(model.backward_tokens(&full(2, 1.0), 100).is_err());
            model.backward_tokens(&loss, 1)?;
            optimizer.step(&mut model)?;
            assert_eq!(weights(&model)?, named(&[("units.0.w", &[-3.0; 2])]));
            Ok(())
        });
    }
}
