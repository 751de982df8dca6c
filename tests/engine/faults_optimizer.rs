//! What the optimizer remembers, and the norm it is given, on any mesh.

use candle_core::Tensor;
use fsdp::prelude::*;
use fsdp_test_support::{absolute, assert_close, relative};

use crate::fixtures::{Dot, Dots, config, full, on_ranks, weights};

#[test]
fn moments_and_step_number_last_from_step_to_step() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let model = Dots { units: vec![Dot::zeros(4)] };
            let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(AdamW::default().lr(1e-3).weight_decay(0.0))?;
            let mut before = vec![0.0; 4];
            for step in 0..6 {
                before = weights(&model)?[0].1.clone();
                let loss: Tensor = model.forward(&vec![full(4, if step < 5 { 4.0 } else { 1.0 })])?;
                model.backward(&loss)?;
                optimizer.step(&mut model)?;
            }
            let after = weights(&model)?[0].1.clone();
            let updates: Vec<f32> = before.iter().zip(&after).map(|(before, after)| before - after).collect();
            // Without moments it would be 1e-3, without the step number 1.75e-3.
            assert_close(&updates, &vec![9.146172e-4; 4], relative(1e-5), strategy);
            Ok(())
        });
    }
}

#[test]
fn the_norm_counts_each_element_once_on_any_mesh() {
    for (outer, inner) in [(2, 2), (4, 1), (1, 4)] {
        for strategy in Strategy::ALL {
            for outer_strategy in [OuterStrategy::NoShard, OuterStrategy::Optim] {
                if outer_strategy == OuterStrategy::Optim && strategy == Strategy::NoShard {
                    continue;
                }
                on_ranks(4, |world| {
                    let mesh = world.mesh(&[("dp_outer", outer), ("dp_shard", inner)])?;
                    let config = FsdpConfig { outer: outer_strategy, ..config(strategy) };
                    let model = Dots { units: vec![Dot::zeros(9), Dot::zeros(1)] };
                    let mut model = model.fully_shard_with(&mesh, &config)?;
                    let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
                    let loss: Tensor = model.forward(&vec![full(9, 1.0), full(1, 4.0)])?;
                    model.backward(&loss)?;
                    assert_eq!(model.clip_grad_norm(1.0)?, 5.0, "{outer} x {inner}, {strategy}");
                    optimizer.step(&mut model)?;
                    let what = format!("{outer} x {inner}, {strategy}");
                    assert_close(&weights(&model)?[1].1, &vec![-0.8], absolute(1e-6), what);
                    Ok(())
                });
            }
        }
    }
}

/// The weights, 1 at first, after a step of this optimizer without gradient.
fn decayed(optimizer: impl Fn(&Fsdp<Dots>) -> fsdp::Result<ShardedOptimizer<AdamW>> + Send + Sync) -> f32 {
    let all = on_ranks(2, |world| {
        let model = Dots { units: vec![Dot::with(5, 1.0)] };
        let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config(Strategy::default()))?;
        let mut optimizer = optimizer(&model)?;
        let loss: Tensor = model.forward(&vec![full(5, 0.0)])?;
        model.backward(&loss)?;
        optimizer.step(&mut model)?;
        Ok(weights(&model)?[0].1[0])
    });
    assert_eq!(all[0], all[1]);
    all[0]
}

#[test]
fn weights_decay_by_the_learning_rate_times_the_decay() {
    // 1 - 0.1 x 0.5.
    assert_eq!(decayed(|model| model.optimizer(AdamW::default().lr(0.1).weight_decay(0.5))), 0.95);
    assert_eq!(decayed(|model| model.optimizer(AdamW::default().lr(0.0).weight_decay(0.5))), 1.0);
}

#[test]
fn a_groups_weights_decay_by_its_own_learning_rate_and_decay() {
    // 1 - 0.1 x 2 x 0.2.
    let group = |_: &fsdp::spec::ParamSpec| ParamGroup::new("all").lr_factor(2.0).weight_decay(0.2);
    assert_eq!(
        decayed(|model| model.optimizer_with(AdamW::default().lr(0.1).weight_decay(0.5), group)),
        0.96
    );
}

/// AdamW whose first step is `0.1 g / (|g| + 1)`: it depends on the size of the gradient.
fn sized() -> AdamW {
    AdamW::default().lr(0.1).eps(1.0).weight_decay(0.0)
}

#[test]
fn adamw_takes_clipped_gradients() {
    on_ranks(2, |world| {
        let model = Dots { units: vec![Dot::with(1, 0.0)] };
        let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config(Strategy::default()))?;
        let mut optimizer = model.optimizer(sized())?;
        let loss: Tensor = model.forward(&vec![full(1, 3.0)])?;
        model.backward(&loss)?;
        assert_eq!(model.clip_grad_norm(1.0)?, 3.0);
        optimizer.step(&mut model)?;
        // A gradient of 1.
        assert_close(&weights(&model)?[0].1, &vec![-0.05], absolute(1e-6), "the weight");
        Ok(())
    });
}

#[test]
fn adamw_takes_unscaled_gradients() {
    on_ranks(2, |world| {
        let model = Dots { units: vec![Dot::with(1, 0.0)] };
        let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config(Strategy::default()))?;
        let mut optimizer = model.optimizer(sized())?;
        let mut scaler = LossScaler::default().initial_scale(64.0);
        let loss: Tensor = model.forward(&vec![full(1, 4.0)])?;
        model.backward(&scaler.scale(&loss)?)?;
        assert!(scaler.step(&mut optimizer, &mut model)?);
        // A gradient of 4.
        assert_close(&weights(&model)?[0].1, &vec![-0.08], absolute(1e-6), "the weight");
        Ok(())
    });
}

/// The weight, 0 at first, after two steps of Nesterov's momentum whose gradients are 1: by hand 1.5, then 1.75 less.
fn with_nesterov(gradient: f32, clip: bool) {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let model = Dots { units: vec![Dot::with(1, 0.0)] };
            let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0).momentum(0.5).nesterov(true))?;
            for expected in [-1.5, -3.25] {
                let loss: Tensor = model.forward(&vec![full(1, gradient)])?;
                model.backward(&loss)?;
                if clip {
                    model.clip_grad_norm(1.0)?;
                }
                optimizer.step(&mut model)?;
                assert_close(&weights(&model)?[0].1, &vec![expected], absolute(1e-5), strategy);
            }
            Ok(())
        });
    }
}

#[test]
fn nesterovs_momentum_looks_ahead() {
    with_nesterov(1.0, false);
}

#[test]
fn nesterovs_momentum_looks_ahead_from_clipped_gradients() {
    with_nesterov(4.0, true);
}
