//! A unit's parameters whole, to look at and to change.

use candle_core::Tensor;
use fsdp::prelude::*;

use crate::fixtures::{Dot, Dots, Two, config, full, launcher, named, on_ranks, weights};

#[test]
fn changes_are_written_back_on_every_mesh_and_the_training_goes_on() {
    for (outer, inner) in [(1, 1), (1, 3), (2, 2)] {
        for strategy in Strategy::ALL {
            for outer_strategy in [OuterStrategy::NoShard, OuterStrategy::Optim] {
                for precision in [MixedPrecision::F32, MixedPrecision::BF16] {
                    if outer_strategy == OuterStrategy::Optim && strategy == Strategy::NoShard {
                        continue;
                    }
                    on_ranks(outer * inner, |world| {
                        let mesh = world.mesh(&[("dp_outer", outer), ("dp_shard", inner)])?;
                        let config = FsdpConfig { outer: outer_strategy, precision, ..config(strategy) };
                        let model = Dots { units: vec![Dot::zeros(5), Dot::zeros(40)] };
                        let mut model = model.fully_shard_with(&mesh, &config)?;
                        let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
                        let step = |model: &mut Fsdp<Dots>, optimizer: &mut ShardedOptimizer<Sgd>| {
                            let loss: Tensor = model.forward(&vec![full(5, 1.0), full(40, 2.0)])?;
                            model.backward(&loss)?;
                            optimizer.step(model)
                        };
                        step(&mut model, &mut optimizer)?;
                        let seen = model.with_full_params("units.1", |params| {
                            assert_eq!(params.len(), 1);
                            assert_eq!(
                                (params[0].spec.name.as_str(), params[0].values.len()),
                                ("units.1.w", 40)
                            );
                            let seen = params[0].values[39];
                            params[0].values.iter_mut().enumerate().for_each(|(i, v)| *v = i as f32);
                            Ok(seen)
                        })?;
                        assert_eq!(seen, -2.0);
                        // The other unit has what the step has made of it, on every rank.
                        let loss: Tensor = model.evaluate(&vec![full(5, 1.0), full(40, 1.0)])?;
                        // bf16 has 8 bits of significand.
                        let error = (loss.to_scalar::<f32>()? - (-5.0 + 780.0)).abs();
                        assert!(error <= if precision == MixedPrecision::F32 { 0.0 } else { 4.0 }, "{error}");
                        step(&mut model, &mut optimizer)?;
                        let expected: Vec<f32> = (0..40).map(|i| i as f32 - 2.0).collect();
                        assert_eq!(
                            weights(&model)?,
                            named(&[("units.0.w", &[-2.0; 5]), ("units.1.w", &expected)])
                        );
                        Ok(())
                    });
                }
            }
        }
    }
}

#[test]
fn reading_changes_nothing() {
    on_ranks(2, |world| {
        let model = Two::zeros(3).fully_shard(&world.data_parallel_mesh())?;
        model.full_params("a")?[0].values.fill(7.0);
        assert_eq!(weights(&model)?, named(&[("a.w", &[0.0; 3]), ("b.w", &[0.0; 3])]));
        let text = model.full_params("c").unwrap_err().to_string();
        assert!(text.contains("no unit `c`") && text.contains("a, b"), "{text}");
        Ok(())
    });
}

#[test]
fn ranks_that_disagree_write_nothing() {
    on_ranks(2, |world| {
        let mut model = Two::zeros(3).fully_shard(&world.data_parallel_mesh())?;
        let error = model.with_full_params("b", |params| {
            params[0].values[2] = world.rank() as f32;
            Ok(())
        });
        let text = error.unwrap_err().to_string();
        assert!(text.contains("`b.w`") && text.contains("ranks 0 and 1 have different values"), "{text}");
        let error = model.with_full_params("b", |params| {
            params[0].values.push(1.0);
            Ok(())
        });
        let text = error.unwrap_err().to_string();
        assert_eq!(text, "parameter `b.w`: was given 4 values for its shape [3]");
        let error = model.with_full_params("b", |params| {
            params[0].values.fill(1.0);
            if world.rank() == 1 { Err(fsdp::Error::Usage("no disk".into())) } else { Ok(()) }
        });
        let text = error.unwrap_err().to_string();
        assert!(text.contains("no disk"), "{text}");
        assert!(world.rank() == 1 || text.contains("rank 1 failed"), "{text}");
        assert_eq!(weights(&model)?, named(&[("a.w", &[0.0; 3]), ("b.w", &[0.0; 3])]));
        Ok(())
    });
}

#[test]
fn gradients_can_be_read_unit_by_unit() {
    on_ranks(2, |world| {
        let model = Two::zeros(3).fully_shard(&world.data_parallel_mesh())?;
        let loss: Tensor = model.forward(&(true, false, full(3, 4.0)))?;
        model.backward(&loss)?;
        let of = |unit: &str| -> fsdp::Result<_> {
            let mut seen = Vec::new();
            model.visit_unit_gradients(unit, |spec, values| {
                seen.push((spec.name.clone(), values.to_vec()));
                Ok(())
            })?;
            Ok(seen)
        };
        assert_eq!(of("a")?, named(&[("a.w", &[4.0; 3])]));
        assert_eq!(of("b")?, []);
        Ok(())
    });
}

#[test]
fn one_rank_that_panics_inside_is_reported() {
    let error = launcher(2)
        .run(|world| {
            let mut model = Two::zeros(3).fully_shard(&world.data_parallel_mesh())?;
            model.with_full_params("a", |_| {
                assert!(world.rank() == 0, "boom");
                Ok(())
            })
        })
        .unwrap_err()
        .to_string();
    assert!(error.contains("rank 1 panicked: boom"), "{error}");
}
