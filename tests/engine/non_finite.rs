//! Gradients that are infinite or NaN never reach the weights: an error, or a step that all ranks skip.

use candle_core::Tensor;
use fsdp::prelude::*;

use crate::fixtures::{Dot, Dots, config, dot, full, named, on_ranks, weights};

/// Two units; what the ranks multiply the weights of the second with.
fn bad_inputs() -> Vec<[f32; 2]> {
    vec![
        [1.0, f32::NAN],
        [f32::NAN, 1.0],
        [1.0, f32::INFINITY],
        [f32::NEG_INFINITY, 1.0],
        // Finite on each rank, but not their sum.
        [f32::MAX, f32::MAX],
    ]
}

fn two() -> Dots {
    Dots { units: vec![Dot::with(3, 1.0), Dot::with(5, 0.125)] }
}

fn inputs(first: f32, second: f32) -> Vec<Tensor> {
    vec![full(3, first), full(5, second)]
}

fn backward(model: &Fsdp<Dots>, first: f32, second: f32) -> fsdp::Result<()> {
    let loss: Tensor = model.forward(&inputs(first, second))?;
    model.backward(&loss)
}

#[test]
fn clipping_names_the_parameter_and_the_rank_and_nothing_is_changed() {
    for strategy in Strategy::ALL {
        for [zero, one] in bad_inputs() {
            let errors = on_ranks(2, |world| {
                let config = FsdpConfig { scaling: GradientScaling::Sum, ..config(strategy) };
                let mut model = two().fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
                let second = [zero, one][world.rank()];
                backward(&model, 1.0, second)?;
                let error = model.clip_grad_norm(1.0).unwrap_err().to_string();
                // Who steps all the same is told again.
                assert_eq!(optimizer.step(&mut model).unwrap_err().to_string(), error);
                assert_eq!((optimizer.steps(), model.step_count()), (0, 0));
                assert_eq!(weights(&model)?, named(&[("units.0.w", &[1.0; 3]), ("units.1.w", &[0.125; 5])]));
                model.reset_step()?;
                backward(&model, 0.5, 0.0)?;
                assert_eq!(model.clip_grad_norm(2.0)?, 3f64.sqrt());
                assert!(optimizer.step(&mut model)?);
                assert_eq!(weights(&model)?[0].1, [0.0; 3], "{strategy}");
                Ok(error)
            });
            assert_eq!(errors[0], errors[1]);
            for part in ["the gradient of `units.1.w` is", "reset_step", "NonFinite::SkipStep"] {
                assert!(errors[0].contains(part), "{part}: {}", errors[0]);
            }
            let whose = match [zero, one] {
                [zero, one] if zero.is_finite() && one.is_finite() => "the losses of all ranks are",
                [zero, _] if zero.is_finite() => "a loss of rank 1 is",
                _ => "a loss of rank 0 is",
            };
            assert!(errors[0].contains(whose), "{whose}: {}", errors[0]);
        }
    }
}

#[test]
fn a_step_that_is_skipped_is_as_if_the_batch_had_never_been() {
    /// Weights after two good batches, with or without bad ones before, between and after.
    fn train(strategy: Strategy, bad: Option<[f32; 2]>, clip: bool, how: &str) -> Vec<(String, Vec<f32>)> {
        let all = on_ranks(2, |world| {
            let by_config = how == "by configuration";
            let non_finite = if by_config { NonFinite::SkipStep } else { NonFinite::Error };
            let config = FsdpConfig { non_finite, ..config(strategy) };
            let mut model = two().fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let mut optimizer = model.optimizer(AdamW::default())?;
            let mut step = |first: f32, second: f32, taken: bool| -> fsdp::Result<()> {
                let before = (optimizer.steps(), model.step_count());
                backward(&model, first, second)?;
                if clip {
                    let norm = if by_config {
                        model.clip_grad_norm(1.0)?
                    } else {
                        model.clip_grad_norm_with(1.0, NonFinite::SkipStep)?
                    };
                    assert_eq!(norm.is_finite(), taken);
                }
                assert_eq!(optimizer.step(&mut model)?, taken);
                let more = u64::from(taken);
                assert_eq!((optimizer.steps(), model.step_count()), (before.0 + more, before.1 + more));
                Ok(())
            };
            for index in 0..3 {
                if let Some(bad) = bad {
                    step(1.0, bad[world.rank()], false)?;
                }
                if index < 2 {
                    step(1.0 + index as f32, 2.0, true)?;
                }
            }
            weights(&model)
        });
        all.into_iter().next().unwrap()
    }
    for strategy in Strategy::ALL {
        for (clip, how) in [(true, "by configuration"), (false, "by configuration"), (true, "by call")] {
            let expected = train(strategy, None, clip, how);
            for bad in [[1.0, f32::NAN], [f32::INFINITY, 1.0], [f32::NAN, f32::NAN]] {
                assert_eq!(
                    train(strategy, Some(bad), clip, how),
                    expected,
                    "{strategy}, {bad:?}, {clip}, {how}"
                );
            }
        }
    }
}

#[test]
fn without_clipping_a_step_looks_where_it_is_told_to() {
    on_ranks(2, |world| {
        // The loss is finite, and so is every output: a gradient of infinity arises in the backward.
        struct Root(Param);

        impl FsdpUnit for Root {
            fn walk<'a>(&'a self, walker: &mut fsdp::engine::Walker<'_, 'a>) {
                self.0.walk(walker);
            }
        }

        impl Forward for Root {
            fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> candle_core::Result<Tensor> {
                (self.0.tensor(scope)? * x)?.sqrt()?.sum_all()
            }
        }

        let config = FsdpConfig { check_finite: true, ..config(Strategy::default()) };
        let root = Root(Param::new(3).with_init(Init::Zeros));
        let mut model = root.fully_shard_with(&world.data_parallel_mesh(), &config)?;
        let mut optimizer = model.optimizer(Sgd::default())?;
        let loss: Tensor = model.forward(&full(3, 1.0))?;
        model.backward(&loss)?;
        let error = optimizer.step(&mut model).unwrap_err().to_string();
        assert!(
            error.contains("the norm of the gradients is inf: the gradient of `` is inf at element 0"),
            "{error}"
        );
        assert!(error.contains("the losses of all ranks are finite"), "{error}");
        assert_eq!(weights(&model)?[0].1, [0.0; 3]);
        Ok(())
    });
}

#[test]
fn a_norm_that_is_looked_at_protects_the_step() {
    on_ranks(2, |world| {
        let mut model = dot(3).fully_shard(&world.data_parallel_mesh())?;
        let mut optimizer = model.optimizer(Sgd::default())?;
        let loss: Tensor = model.forward(&vec![full(3, f32::NAN)])?;
        model.backward(&loss)?;
        assert!(model.grad_norm()?.is_nan());
        assert!(optimizer.step(&mut model).is_err());
        assert_eq!(weights(&model)?[0].1, [0.0; 3]);
        Ok(())
    });
}

#[test]
fn a_loss_scaler_decides_by_itself() {
    for non_finite in [NonFinite::Error, NonFinite::SkipStep] {
        on_ranks(2, |world| {
            let config = FsdpConfig { non_finite, ..config(Strategy::default()) };
            let mut model = dot(3).fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
            let mut scaler = LossScaler::default().initial_scale(4.0);
            for (x, taken) in [(f32::INFINITY, false), (0.25, true)] {
                let x = if world.rank() == 1 { x } else { 0.25 };
                let loss: Tensor = model.forward(&vec![full(3, x)])?;
                model.backward(&scaler.scale(&loss)?)?;
                assert_eq!(scaler.unscale(&model)?, taken);
                assert_eq!(model.clip_grad_norm(10.0)?.is_finite(), taken);
                assert_eq!(scaler.step(&mut optimizer, &mut model)?, taken);
            }
            assert_eq!((scaler.current_scale(), optimizer.steps()), (2.0, 1));
            assert_eq!(weights(&model)?[0].1, [-0.25; 3]);
            Ok(())
        });
    }
}

#[test]
fn owners_skip_too() {
    on_ranks(2, |world| {
        let config = FsdpConfig { non_finite: NonFinite::SkipStep, ..config(Strategy::default()) };
        let mut model = two().fully_shard_with(&world.data_parallel_mesh(), &config)?;
        let mut optimizer =
            model.owner_optimizer(Muon::default(), Sgd::default().lr(1.0).weight_decay(0.0))?;
        backward(&model, 1.0, f32::NAN)?;
        assert!(!optimizer.step(&mut model)?);
        backward(&model, 0.5, 0.25)?;
        assert!(optimizer.step(&mut model)?);
        assert_eq!(model.step_count(), 1);
        assert_eq!(weights(&model)?[1].1, [-0.125; 5]);
        Ok(())
    });
}

#[test]
fn ranks_that_would_do_otherwise_are_told_when_the_model_is_sharded() {
    on_ranks(2, |world| {
        let non_finite = [NonFinite::Error, NonFinite::SkipStep][world.rank()];
        let config = FsdpConfig { non_finite, ..config(Strategy::default()) };
        let error = dot(3).fully_shard_with(&world.data_parallel_mesh(), &config).unwrap_err().to_string();
        assert!(error.contains("not finite: Error") && error.contains("not finite: SkipStep"), "{error}");
        Ok(())
    });
}
