//! Whole weights are given up after the backward of their unit, or by hand, and what is computed stays the same.

use candle_core::Tensor;
use fsdp::memory::Category;
use fsdp::prelude::*;

use crate::fixtures::{Dot, Dots, config, full, on_ranks, weights};

/// Of three shapes.
const SIZES: [usize; 4] = [64, 64, 192, 128];

fn model() -> Dots {
    Dots { units: SIZES.map(|n| Dot::with(n, 0.5)).into() }
}

fn inputs(x: f32) -> Vec<Tensor> {
    SIZES.map(|n| full(n, x)).into()
}

fn gathers(model: &Fsdp<Dots>) -> u64 {
    model.traffic().iter().find(|report| report.operation == "all-gather").unwrap().counter.calls
}

fn gathered_bytes<M>(model: &Fsdp<M>) -> usize {
    let reports = model.memory(0);
    reports.iter().find(|report| report.usage.category == Category::GatherPool).unwrap().usage.current
}

#[test]
fn units_that_are_kept_are_given_up_after_their_backward_if_so_said() {
    use ReshardAfterForward::{Always, Never, Ranks};
    for mode in [Always, Never, Ranks(2)] {
        for recompute in [Recompute::None, Recompute::Unit] {
            let run = |reshard_after_backward| {
                on_ranks(4, |world| {
                    let config = FsdpConfig {
                        reshard_after_forward: mode,
                        reshard_after_backward,
                        recompute,
                        ..config(Strategy::default())
                    };
                    let mut model = model().fully_shard_with(&world.data_parallel_mesh(), &config)?;
                    let mut optimizer = model.optimizer(AdamW::default())?;
                    for step in 0..3 {
                        for microbatch in 0..2 {
                            let x = (1 + step + microbatch + world.rank()) as f32;
                            let loss: Tensor = model.forward(&inputs(x))?;
                            model.backward(&loss)?;
                            let whole = model.gathered_units();
                            if reshard_after_backward {
                                assert_eq!(whole, Vec::<String>::new(), "{mode:?}");
                            } else {
                                assert!(!whole.is_empty(), "{mode:?}");
                            }
                            if mode == Never {
                                let all = SIZES.iter().sum::<usize>() * 4;
                                let expected = if reshard_after_backward { 0 } else { all };
                                assert_eq!(gathered_bytes(&model), expected);
                            }
                        }
                        optimizer.step(&mut model)?;
                    }
                    weights(&model)
                })
            };
            assert_eq!(run(true), run(false), "{mode:?}, {recompute:?}");
        }
    }
}

#[test]
fn a_unit_that_runs_again_in_the_backward_keeps_its_weights_till_then() {
    on_ranks(2, |world| {
        let config = FsdpConfig {
            reshard_after_forward: ReshardAfterForward::Never,
            reshard_after_backward: true,
            ..config(Strategy::default())
        };
        let model = model().fully_shard_with(&world.data_parallel_mesh(), &config)?;
        let before = gathers(&model);
        let first: Tensor = model.forward(&inputs(1.0))?;
        let second: Tensor = model.forward(&inputs(2.0))?;
        model.backward(&first)?;
        assert_eq!(model.gathered_units().len(), SIZES.len());
        model.backward(&second)?;
        assert_eq!(model.gathered_units(), Vec::<String>::new());
        // The units once each; the root has no weights.
        assert_eq!(gathers(&model) - before, SIZES.len() as u64);
        Ok(())
    });
}

#[test]
fn a_unit_can_be_resharded_by_hand() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let config = FsdpConfig { reshard_after_forward: ReshardAfterForward::Never, ..config(strategy) };
            let model = model().fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let loss: Tensor = model.forward(&inputs(1.0))?;
            let before = gathers(&model);
            model.reshard("units.2")?;
            assert!(!model.gathered_units().contains(&"units.2".to_string()));
            if strategy.shards_params() {
                assert_eq!(model.gathered_units().len(), SIZES.len() - 1);
                assert_eq!(gathered_bytes(&model), (64 + 64 + 128) * 4);
            }
            // In use, and not there at all.
            let error = model.reshard("(root)").unwrap_err().to_string();
            assert!(error.contains("unit `(root)` are in use"), "{error}");
            assert!(model.reshard("units.9").unwrap_err().to_string().contains("there is no unit `units.9`"));
            model.backward(&loss)?;
            let again = u64::from(strategy.shards_params());
            model.finish_grad_sync()?;
            assert_eq!(gathers(&model) - before, again, "{strategy}");
            model.visit_gradients(|_, values| {
                assert!(values.iter().all(|value| *value == 1.0));
                Ok(())
            })?;
            Ok(())
        });
    }
}

/// A weight of the root and one of a unit.
#[derive(FsdpUnit)]
struct Rooted {
    w: Param,
    unit: Unit<Dot>,
}

impl Forward for Rooted {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> candle_core::Result<Tensor> {
        (x * self.w.tensor(scope)?)?.sum_all()? + self.unit.forward(x, &(), scope)?
    }
}

#[test]
fn the_root_is_given_up_after_its_backward_too_and_has_one_name() {
    let run = |reshard_after_backward| {
        on_ranks(2, |world| {
            let config = FsdpConfig { reshard_after_backward, ..config(Strategy::default()) };
            let model = Rooted { w: Param::new(256).with_init(Init::Ones), unit: Dot::with(256, 0.5) };
            let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let mut optimizer = model.optimizer(AdamW::default())?;
            let x = full(64, 1.0 + world.rank() as f32);
            let x = Tensor::cat(&[&x; 4], 0)?;
            for _ in 0..3 {
                // The first backward of two keeps it for the second.
                let [first, second] = [1.0, 2.0].map(|by| model.forward::<_, Tensor>(&(&x * by).unwrap()));
                model.backward(&first?)?;
                assert!(model.gathered_units().contains(&"(root)".to_string()));
                model.backward(&second?)?;
                let root = usize::from(!reshard_after_backward);
                let names = model.gathered_units();
                assert_eq!(names.iter().filter(|name| *name == "(root)").count(), root, "{names:?}");
                // The memory that units take turns in stays.
                assert_eq!(
                    gathered_bytes(&model),
                    if reshard_after_backward { 256 * 4 } else { (256 + 256) * 4 }
                );
                optimizer.step(&mut model)?;
            }
            weights(&model)
        })
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn what_units_do_after_their_forward_can_be_set_between_the_passes() {
    use ReshardAfterForward::{Always, Never, Ranks};
    for built in [Always, Never, Ranks(2)] {
        // Two steps in each way; the loss and the weights are the same in all.
        let ways = [built, Never, Always, Never, built];
        let run = |ways: &'static [Option<ReshardAfterForward>]| {
            on_ranks(4, |world| {
                let config = FsdpConfig { reshard_after_forward: built, ..config(Strategy::default()) };
                let mut model = model().fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let mut optimizer = model.optimizer(AdamW::default())?;
                for (step, &way) in ways.iter().enumerate() {
                    if let Some(way) = way {
                        model.set_reshard_after_forward("(root)", way)?;
                        assert_eq!(model.gathered_units(), Vec::<String>::new());
                    }
                    for half in 0..2 {
                        let before = gathers(&model);
                        let loss: Tensor = model.forward(&inputs((1 + step + half + world.rank()) as f32))?;
                        if way == Some(Never) {
                            assert_eq!(model.gathered_units().len(), SIZES.len());
                            assert_eq!(gathered_bytes(&model), SIZES.iter().sum::<usize>() * 4);
                        }
                        model.backward(&loss)?;
                        optimizer.step(&mut model)?;
                        // Two are there still when the backward begins.
                        let expected = match way {
                            Some(Never) => SIZES.len(),
                            Some(Always | Ranks(_)) => 2 * SIZES.len() - 2,
                            None => continue,
                        };
                        assert_eq!(gathers(&model) - before, expected as u64, "{built:?}, {way:?}, {half}");
                    }
                }
                let pool =
                    model.memory(2).into_iter().find(|report| report.usage.category == Category::GatherPool);
                let pool = pool.unwrap();
                assert!(pool.usage.peak as u64 <= pool.formula, "{built:?}: {pool:?}");
                weights(&model)
            })
        };
        let ways: &'static [_] = Box::leak(Box::new(ways.map(Some)));
        assert_eq!(run(ways), run(&[None; 5]), "{built:?}");
    }
}

#[test]
fn a_setting_is_of_the_units_at_a_path_and_inside_it() {
    use ReshardAfterForward::{Always, Never, Ranks};
    on_ranks(4, |world| {
        let model = model().fully_shard(&world.data_parallel_mesh())?;
        model.set_reshard_after_forward("units.1", Never)?;
        let first: Tensor = model.forward(&inputs(1.0))?;
        // The one that keeps its weights, and the last two.
        assert_eq!(model.gathered_units(), ["units.1", "units.2", "units.3"]);
        model.set_reshard_after_forward("units.1", Always)?;
        model.backward(&first)?;
        model.finish_grad_sync()?;
        model.visit_gradients(|_, values| {
            assert!(values.iter().all(|value| *value == 1.0));
            Ok(())
        })?;
        let refused = |path: &str, mode, parts: &[&str]| {
            let error = model.set_reshard_after_forward(path, mode).unwrap_err().to_string();
            for part in parts {
                assert!(error.contains(part), "`{part}` is not in: {error}");
            }
        };
        refused("units.9", Never, &["there is no unit `units.9`"]);
        refused("units.2", Ranks(2), &["unit `units.2`", "groups of 2 ranks", "made with Always", "`Never`"]);
        Ok(())
    });
}
