//! A rank that calls alone what all must call, or does not call it.

use candle_core::Tensor;
use fsdp::launch::World;
use fsdp::prelude::*;

use super::{Ends, Plan, Training, at_once};
use crate::fixtures::config;

/// Rank 1 of 3 does `deviate` in place of its third step, the others the step.
fn instead_of_a_step(
    strategy: Strategy,
    deviate: impl Fn(&mut Training) -> fsdp::Result<()> + Send + Sync,
) -> impl Fn(&World) -> fsdp::Result<()> + Send + Sync {
    move |world| {
        let mut training = Training::begun(&world.data_parallel_mesh(), &config(strategy))?;
        if world.rank() == 1 {
            deviate(&mut training)?
        } else {
            training.step(&Plan::default())?
        }
        training.go_on()
    }
}

/// Rank 1 does `deviate` on top of what all do: it waits there for the others, and they for it in the next step.
#[track_caller]
fn on_top(deviate: impl Fn(&mut Training) -> fsdp::Result<()> + Send + Sync) -> Ends {
    let main = instead_of_a_step(Strategy::default(), |training| {
        training.microbatch(&Plan::default())?;
        deviate(training)?;
        training.optimize()
    });
    at_once(3, main).every_rank_says(&["the ranks wait for each other: ", HINT])
}

/// The end of an error of ranks that are in different collectives.
const HINT: &str = "; was something called on one rank only?";

#[test]
fn a_step_left_out() {
    let ends =
        at_once(3, instead_of_a_step(Strategy::default(), |training| training.microbatch(&Plan::default())));
    ends.every_rank_says(&["differs", "all-gather of unit `layers.0`", "step 3", "step 4", "rank 1"]);
}

#[test]
fn the_first_step_left_out() {
    let ends = at_once(3, |world| {
        let mut training = Training::of(super::layers(4).fully_shard(&world.data_parallel_mesh())?)?;
        training.microbatch(&Plan::default())?;
        if world.rank() != 1 {
            training.optimize()?;
        }
        training.go_on()
    });
    // The others are in the step, rank 1 in the next forward.
    ends.every_rank_says(&[
        "host-gather of `optimizer` (optimizer, step 1",
        "(forward, step 1",
        "rank 1 waits",
        HINT,
    ]);
}

#[test]
fn a_step_left_out_where_no_weights_are_gathered() {
    let ends = at_once(
        3,
        instead_of_a_step(Strategy::NoShard, |training| {
            training.microbatch(&Plan::default())?;
            training.model.reset_step()
        }),
    );
    ends.every_rank_says(&["differs", "all-reduce of unit `layers.", "step 3", "step 4", "rank 1"]);
}

fn one_microbatch_fewer(world: &World, strategy: Strategy) -> fsdp::Result<()> {
    let mut training = Training::begun(&world.data_parallel_mesh(), &config(strategy))?;
    for _ in 0..if world.rank() == 1 { 1 } else { 2 } {
        training.microbatch(&Plan::default())?;
    }
    training.optimize()?;
    training.go_on()
}

#[test]
fn a_microbatch_left_out() {
    let ends = at_once(3, |world| one_microbatch_fewer(world, Strategy::OptimGradsParams));
    ends.every_rank_says(&["differs", "all-gather of unit `layers.0` (forward, step 4", "step 3", "rank 1"]);
}

#[test]
fn a_microbatch_left_out_where_weights_stay_whole() {
    // Rank 1 waits in the next gather of weights, the others in the reduction of a second microbatch.
    let ends = at_once(3, |world| one_microbatch_fewer(world, Strategy::OptimGrads));
    let parts = [
        "the ranks wait for each other",
        "all-gather of unit `layers.0` (forward, step 4",
        "reduce-scatter of unit `layers.",
        "rank ",
    ];
    ends.every_rank_says(&parts);
}

#[test]
fn clipping_alone() {
    let ends = on_top(|training| training.model.clip_grad_norm(1.0).map(drop));
    ends.every_rank_says(&[
        "`gradient norm` (optimizer, step 3",
        "all-gather of unit `layers.0` (forward, step 4",
    ]);
}

#[test]
fn the_norm_asked_for_alone() {
    let ends = on_top(|training| training.model.grad_norm().map(drop));
    ends.every_rank_says(&[
        "`gradient norm` (optimizer, step 3",
        "all-gather of unit `layers.0` (forward, step 4",
    ]);
}

#[test]
fn weights_visited_alone() {
    let ends = on_top(|training| training.model.visit_weights(|_, _| Ok(())));
    ends.every_rank_says(&["all-gather of unit `weights` (setup, step 3", "`layers.0` (forward, step 4"]);
}

#[test]
fn gradients_visited_alone() {
    let ends = on_top(|training| training.model.visit_gradients(|_, _| Ok(())));
    ends.every_rank_says(&[
        "all-gather of unit `gradients` (optimizer, step 3",
        "`layers.0` (forward, step 4",
    ]);
}

#[test]
fn full_parameters_asked_for_alone() {
    let ends = on_top(|training| training.model.full_params("layers.1").map(drop));
    ends.every_rank_says(&["all-gather of unit `weights` (setup, step 3", "`layers.0` (forward, step 4"]);
}

#[test]
fn missing_gradients_asked_for_alone() {
    let ends = on_top(|training| training.model.parameters_without_gradient().map(drop));
    ends.every_rank_says(&["`received gradients` (optimizer, step 3", "`layers.0` (forward, step 4"]);
}

#[test]
fn joining_alone() {
    let ends = on_top(|training| training.model.join(true).map(drop));
    ends.every_rank_says(&["`join` (setup, step 3", "all-gather of unit `layers.0` (forward, step 4"]);
}

#[test]
fn evaluating_alone() {
    let ends = at_once(
        3,
        instead_of_a_step(Strategy::default(), |training| {
            let _: Tensor = training.model.evaluate(&Plan::default())?;
            training.step(&Plan::default())
        }),
    );
    ends.every_rank_says(&[
        "differs",
        "all-gather of unit `layers.",
        "(forward, step 3",
        "(backward, step 3",
        "rank 1",
        HINT,
    ]);
}

/// `deviate` around a whole evaluation or step, where the weights stay whole or not: the ranks are in different
/// collectives, of different channels or of one.
#[test]
fn a_step_or_an_evaluation_of_one_rank_is_told_at_once_and_shortly() {
    for strategy in Strategy::ALL {
        // Without shards an evaluation is a rank's own matter.
        for evaluates in
            [true, false].into_iter().filter(|evaluates| !evaluates || strategy != Strategy::NoShard)
        {
            let ends = at_once(2, |world| {
                let mut training = Training::begun(&world.data_parallel_mesh(), &config(strategy))?;
                if world.rank() == 0 {
                    if evaluates {
                        let _: Tensor = training.model.evaluate(&Plan::default())?;
                    } else {
                        training.step(&Plan::default())?;
                    }
                }
                training.model.visit_weights(|_, _| Ok(()))?;
                training.go_on()
            });
            for error in ends.errors.iter().flatten() {
                assert!(error.len() < 420, "{} characters: {error}", error.len());
                assert!(!error.contains("``"), "{error}");
            }
            assert!(ends.launch.len() < 520, "{}", ends.launch);
        }
    }
}

#[test]
fn a_rank_that_gathers_while_the_other_reduces_in_the_first_step() {
    for strategy in [Strategy::Optim, Strategy::OptimGrads] {
        let ends = at_once(2, |world| {
            let model = super::layers(2).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut training = Training::of(model)?;
            training.step(&Plan::order(if world.rank() == 0 { vec![0, 1] } else { vec![0] }))
        });
        ends.every_rank_says(&[
            "the ranks wait for each other: ",
            "rank 0 waits in all-gather of unit `layers.1` (forward, step 1, ",
            "rank 1 waits in reduce-scatter of unit `layers.0` (backward, step 1, ",
            HINT,
        ]);
    }
}

#[test]
fn unsharding_alone() {
    let ends = at_once(
        3,
        instead_of_a_step(Strategy::default(), |training| {
            training.model.unshard("layers.2")?.wait()?;
            training.step(&Plan::default())
        }),
    );
    ends.every_rank_says(&["differs", "all-gather of unit `layers.2`", "`layers.0`", "rank 1"]);
}

#[test]
fn no_sync_alone() {
    for strategy in Strategy::ALL {
        let unsynced = |training: &mut Training| {
            let guard = training.model.no_sync();
            training.microbatch(&Plan::default())?;
            drop(guard);
            training.optimize()
        };
        let ends = at_once(3, instead_of_a_step(strategy, unsynced));
        let ends = ends.every_rank_says(&["differs", "of unit `layers.", "step 3", "rank 1"]);
        ends.every_rank_says(if strategy == Strategy::NoShard {
            &["all-reduce", "(backward", "(optimizer"]
        } else {
            &["all-gather", "in a microbatch under `no_sync`", "in the last microbatch"]
        });
    }
}

#[test]
fn no_sync_alone_in_one_microbatch_of_two() {
    for strategy in [Strategy::OptimGrads, Strategy::OptimGradsParams] {
        let ends = at_once(3, |world| {
            let mut training = Training::begun(&world.data_parallel_mesh(), &config(strategy))?;
            let guard = (world.rank() == 1).then(|| training.model.no_sync());
            training.microbatch(&Plan::default())?;
            drop(guard);
            training.microbatch(&Plan::default())?;
            training.optimize()?;
            training.go_on()
        });
        ends.every_rank_says(&[
            "all-gather of unit `layers.0` (forward, step 3",
            "under `no_sync`",
            "rank 1 ",
        ]);
    }
}

#[test]
fn the_last_microbatch_called_so_by_one_rank_only() {
    for strategy in Strategy::ALL {
        let ends = at_once(3, |world| {
            let mut training = Training::begun(&world.data_parallel_mesh(), &config(strategy))?;
            training.model.set_is_last_microbatch(world.rank() == 1);
            training.microbatch(&Plan::default())?;
            training.optimize()?;
            training.go_on()
        });
        let ends = ends.every_rank_says(&["differs", "of unit `layers.", "step 3", "rank 1"]);
        ends.every_rank_says(if strategy == Strategy::NoShard {
            &["all-reduce", "(backward", "(optimizer"]
        } else {
            &["all-gather", "in a microbatch that is not the last", "in the last microbatch"]
        });
    }
}

/// Rank 1 of 3 does `deviate` between two steps, which no collective carries; the next one tells.
#[track_caller]
fn is_told(
    strategy: Strategy,
    deviate: impl Fn(&mut Training) -> fsdp::Result<()> + Send + Sync,
    parts: &[&str],
) {
    let ends = at_once(3, |world| {
        let mut training = Training::begun(&world.data_parallel_mesh(), &config(strategy))?;
        if world.rank() == 1 {
            deviate(&mut training)?;
        }
        training.go_on()
    });
    ends.every_rank_says(&["differs: rank ", "of unit `layers.", "rank 1 is "]).every_rank_says(parts);
}

#[test]
fn a_learning_rate_set_alone() {
    for strategy in Strategy::ALL {
        let set = |training: &mut Training| {
            training.optimizer.set_learning_rate(0.5);
            Ok(())
        };
        is_told(
            strategy,
            set,
            &["rank 1 is after step 3 by optimizer sgd, learning rate 0.5", "learning rate 0.001"],
        );
    }
}

#[test]
fn weights_loaded_alone() {
    for strategy in Strategy::ALL.into_iter().filter(|strategy| *strategy != Strategy::NoShard) {
        let load = |training: &mut Training| training.model.load_weights(|_, _, _| Ok(()));
        is_told(strategy, load, &["rank 1 is after a load in step 3", "is after step 2 by optimizer sgd"]);
    }
    // Where there are copies, it waits for the others to compare them.
    let ends = at_once(3, |world| {
        let mut training = Training::begun(&world.data_parallel_mesh(), &config(Strategy::NoShard))?;
        if world.rank() == 1 {
            training.model.load_weights(|_, _, _| Ok(()))?;
        }
        training.go_on()
    });
    ends.every_rank_says(&[
        "`copies of the weights` (setup, step 3",
        "of unit `layers.",
        "(backward, step 3",
        HINT,
    ]);
}

#[test]
fn a_step_reset_alone() {
    for strategy in Strategy::ALL {
        let reset = |training: &mut Training| training.model.reset_step();
        is_told(strategy, reset, &["rank 1 is after a reset in step 3", "is after step 2 by optimizer sgd"]);
        // Its gradients are gone, and with them its part of the step.
        let reset = |training: &mut Training| {
            training.microbatch(&Plan::default())?;
            training.model.reset_step()?;
            training.optimize()
        };
        let ends = at_once(3, instead_of_a_step(strategy, reset));
        ends.every_rank_says(&[
            "no backward of model `Layers` has ended since its last optimizer step or reset",
        ]);
    }
}
