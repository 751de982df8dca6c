//! Hybrid sharding: inner ranks share the state, outer ranks replicate it or cut the optimizer's part further.

use candle_core::Tensor;
use fsdp::engine::TrafficReport;
use fsdp::optim::{OwnerFn, WholeParam};
use fsdp::prelude::*;
use fsdp_test_support::{absolute, assert_close, relative};

use crate::fixtures::{Dot, Dots, Two, config, dot, full, gradients, named, on_ranks, weights};

fn calls(traffic: &[TrafficReport], operation: &str) -> u64 {
    traffic.iter().find(|report| report.operation == operation).map_or(0, |report| report.counter.calls)
}

/// Launches of one kind since `before`.
fn since<M>(model: &Fsdp<M>, before: &[TrafficReport], operation: &str) -> u64 {
    calls(&model.traffic(), operation) - calls(before, operation)
}

#[test]
fn gradients_are_means_over_all_ranks_whatever_the_sizes() {
    for (outer, inner) in [(2, 1), (1, 2), (2, 2), (3, 1), (2, 3), (1, 1)] {
        for strategy in Strategy::ALL {
            for outer_strategy in [OuterStrategy::NoShard, OuterStrategy::Optim] {
                if outer_strategy == OuterStrategy::Optim && inner > 1 && strategy == Strategy::NoShard {
                    continue;
                }
                let ranks = outer * inner;
                let rows = on_ranks(ranks, |world| {
                    let mesh = world.mesh(&[("dp_outer", outer), ("dp_shard", inner)])?;
                    let config = FsdpConfig { outer: outer_strategy, ..config(strategy) };
                    let mut model = dot(3).fully_shard_with(&mesh, &config)?;
                    let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
                    for _ in 0..2 {
                        let loss: Tensor = model.forward(&vec![full(3, 2.0 * world.rank() as f32 + 1.0)])?;
                        model.backward(&loss)?;
                        // The mean of 1, 3, 5, ..
                        assert_eq!(gradients(&model)?, named(&[("units.0.w", &[ranks as f32; 3])]));
                        let expected = ranks as f64 * 3f64.sqrt();
                        assert_close(&model.grad_norm()?, &expected, absolute(1e-12), "the norm");
                        optimizer.step(&mut model)?;
                    }
                    weights(&model)
                });
                let expected = named(&[("units.0.w", &[-2.0 * ranks as f32; 3])]);
                assert!(rows.iter().all(|row| *row == expected), "{outer} x {inner} {strategy}: {rows:?}");
            }
        }
    }
}

#[test]
fn sums_that_travel_in_sixteen_bits_are_rounded_once_among_inner_and_outer_ranks() {
    // In bf16 256 + 1 is 256, and 256 + 3 is 260, the even one of two neighbours.
    for (main_grads, small, sum) in [(Dtype::F32, 1.0, 514.0), (Dtype::BF16, 3.0, 520.0)] {
        for strategy in Strategy::ALL {
            on_ranks(4, |world| {
                let mesh = world.mesh(&[("dp_outer", 2), ("dp_shard", 2)])?;
                let precision = MixedPrecision { reduce: Dtype::BF16, main_grads, ..MixedPrecision::F32 };
                let config = FsdpConfig { precision, scaling: GradientScaling::Sum, ..config(strategy) };
                let model = dot(9).fully_shard_with(&mesh, &config)?;
                let x = if world.rank() % 2 == 0 { 256.0 } else { small };
                let loss: Tensor = model.forward(&vec![full(9, x)])?;
                model.backward(&loss)?;
                assert_eq!(gradients(&model)?, named(&[("units.0.w", &[sum; 9])]), "{strategy} {main_grads}");
                Ok(())
            });
        }
    }
}

#[test]
fn inner_collectives_come_every_microbatch_and_outer_ones_once_a_step() {
    for outer_strategy in [OuterStrategy::NoShard, OuterStrategy::Optim] {
        on_ranks(4, |world| {
            let mesh = world.mesh(&[("dp_outer", 2), ("dp_shard", 2)])?;
            let config = FsdpConfig {
                outer: outer_strategy,
                double_buffer: false,
                ..config(Strategy::OptimGradsParams)
            };
            let mut model = Two::zeros(5).fully_shard_with(&mesh, &config)?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
            for step in 0..3 {
                let before = model.traffic();
                for microbatch in 0..3 {
                    model.set_is_last_microbatch(microbatch == 2);
                    let loss: Tensor = model.forward(&(true, true, full(5, 1.0)))?;
                    model.backward(&loss)?;
                }
                optimizer.step(&mut model)?;
                let shared = outer_strategy == OuterStrategy::Optim;
                // Two units, each gathered in forward and backward of three microbatches; after a step each of
                // them once among the outer ranks.
                let outer_gathers = if shared && step > 0 { 2 } else { 0 };
                assert_eq!(since(&model, &before, "all-gather"), 2 * 2 * 3 + outer_gathers);
                assert_eq!(since(&model, &before, "reduce-scatter"), 2 * 3 + if shared { 2 } else { 0 });
                assert_eq!(since(&model, &before, "all-reduce"), if shared { 0 } else { 2 });
            }
            // 3 steps of 3 microbatches of gradient 1.
            assert_eq!(weights(&model)?, named(&[("a.w", &[-9.0; 5]), ("b.w", &[-9.0; 5])]));
            Ok(())
        });
    }
}

#[test]
fn a_unit_without_gradient_in_the_last_microbatch_is_reduced_over_the_outer_ranks_too() {
    for strategy in Strategy::ALL {
        on_ranks(4, |world| {
            let mesh = world.mesh(&[("dp_outer", 2), ("dp_shard", 2)])?;
            let model = Two::zeros(3).fully_shard_with(&mesh, &config(strategy))?;
            {
                let _guard = model.no_sync();
                let loss: Tensor = model.forward(&(true, true, full(3, world.rank() as f32)))?;
                model.backward(&loss)?;
            }
            let loss: Tensor = model.forward(&(true, false, full(3, 1.0)))?;
            model.backward(&loss)?;
            assert_eq!(gradients(&model)?, named(&[("a.w", &[2.5; 3]), ("b.w", &[1.5; 3])]));
            Ok(())
        });
    }
}

#[test]
fn a_backward_after_the_outer_reduction_is_refused() {
    on_ranks(2, |world| {
        let mesh = world.mesh(&[("dp_outer", 2), ("dp_shard", 1)])?;
        let model = dot(3).fully_shard(&mesh)?;
        for round in 0..2 {
            let loss: Tensor = model.forward(&vec![full(3, 1.0)])?;
            match model.backward(&loss) {
                Ok(()) => assert_eq!(round, 0),
                Err(error) => {
                    assert_eq!(round, 1);
                    assert!(error.to_string().contains("under `model.no_sync()`"), "{error}");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn memory_is_the_formula_with_the_optimizer_cut_by_the_outer_ranks() {
    for strategy in [Strategy::Optim, Strategy::OptimGrads, Strategy::OptimGradsParams] {
        for precision in [MixedPrecision::F32, MixedPrecision::BF16] {
            on_ranks(6, |world| {
                let mesh = world.mesh(&[("dp_outer", 3), ("dp_shard", 2)])?;
                let config = FsdpConfig { outer: OuterStrategy::Optim, precision, ..config(strategy) };
                let dots = Dots { units: vec![Dot::zeros(100), Dot::zeros(100)] };
                let mut model = dots.fully_shard_with(&mesh, &config)?;
                let mut optimizer = model.optimizer(AdamW::default())?;
                for _ in 0..2 {
                    let loss: Tensor = model.forward(&vec![full(100, 1.0), full(100, 2.0)])?;
                    model.backward(&loss)?;
                    optimizer.step(&mut model)?;
                }
                // 100 elements padded to 6 x 64 bytes: 192 in f32 and in bf16; two units, two states of a sixth.
                let state = 2 * 2 * 192 / 6 * 4;
                for report in model.memory(2) {
                    assert!(report.usage.peak as u64 <= report.formula, "{report:?}");
                    if !format!("{:?}", report.usage.category).contains("Pool") {
                        assert_eq!(report.usage.current as u64, report.formula, "{report:?}");
                    }
                }
                assert_eq!(model.memory_plan().optimizer_state * 2, state);
                Ok(())
            });
        }
    }
}

#[test]
fn context_parallel_ranks_share_the_shards() {
    on_ranks(4, |world| {
        let mesh = world.mesh(&[("dp_shard", 2), ("cp", 2)])?;
        let model = dot(100).fully_shard(&mesh)?;
        assert_eq!(model.layout().buckets[0].ranks, 4);
        let loss: Tensor = model.forward(&vec![full(100, world.rank() as f32)])?;
        model.backward(&loss)?;
        assert_eq!(gradients(&model)?, named(&[("units.0.w", &[1.5; 100])]));
        Ok(())
    });
}

#[test]
fn an_outer_cut_of_what_is_not_sharded_is_refused() {
    on_ranks(4, |world| {
        let mesh = world.mesh(&[("dp_outer", 2), ("dp_shard", 2)])?;
        let config = FsdpConfig { outer: OuterStrategy::Optim, ..config(Strategy::NoShard) };
        let text = dot(3).fully_shard_with(&mesh, &config).unwrap_err().to_string();
        assert!(text.contains("outer strategy `optim`") && text.contains("strategy `no-shard`"), "{text}");
        Ok(())
    });
}

#[test]
fn owner_steps_and_averages_know_what_the_outer_ranks_have() {
    for (outer, inner) in [(2, 2), (3, 1), (1, 4)] {
        for outer_strategy in [OuterStrategy::NoShard, OuterStrategy::Optim] {
            for precision in [MixedPrecision::F32, MixedPrecision::BF16] {
                on_ranks(outer * inner, |world| {
                    let mesh = world.mesh(&[("dp_outer", outer), ("dp_shard", inner)])?;
                    let config =
                        FsdpConfig { outer: outer_strategy, precision, ..config(Strategy::default()) };
                    let dots = Dots { units: vec![Dot::zeros(100), Dot::zeros(7)] };
                    let mut model = dots.fully_shard_with(&mesh, &config)?;
                    let rule = OwnerFn::new(|_, param: &mut WholeParam<'_>| {
                        for (weight, grad) in param.weights.iter_mut().zip(param.grads) {
                            *weight -= grad;
                        }
                        Ok(())
                    });
                    let mut optimizer = model.owner_optimizer(rule, Sgd::default())?;
                    let mut ema = model.ema(0.5)?;
                    for step in 1..=3 {
                        let loss: Tensor = model.forward(&vec![full(100, 2.0), full(7, 4.0)])?;
                        model.backward(&loss)?;
                        optimizer.step(&mut model)?;
                        ema.update(&model)?;
                        let step = step as f32;
                        let expected = |step: f32| {
                            named(&[("units.0.w", &[-2.0 * step; 100]), ("units.1.w", &[-4.0 * step; 7])])
                        };
                        assert_eq!(weights(&model)?, expected(step));
                        // 0.5, 1.25, 2.125
                        let average = step - 1.0 + 0.5f32.powf(step);
                        let mut seen = 0.0;
                        model.with_ema(&mut ema, |model| {
                            assert_eq!(weights(model)?, expected(average));
                            let sum: Tensor = model.evaluate(&vec![full(100, 1.0), full(7, 0.0)])?;
                            seen = sum.to_scalar::<f32>()?;
                            Ok(())
                        })?;
                        // candle sums bf16 in bf16.
                        let tolerance = if precision == MixedPrecision::F32 { 1e-6 } else { 0.2 };
                        assert_close(&seen, &(-200.0 * average), relative(tolerance), average);
                        assert_eq!(weights(&model)?, expected(step));
                    }
                    Ok(())
                });
            }
        }
    }
}
