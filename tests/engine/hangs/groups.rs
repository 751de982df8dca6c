//! Hybrid sharding, two replicas of two ranks each: what goes wrong in one group, all ranks learn.

use fsdp::launch::World;
use fsdp::prelude::*;

use super::{Mishap, Place, Plan, Training, at_once, in_time, layers};
use crate::fixtures::config;

fn mesh(world: &World) -> fsdp::Result<DeviceMesh> {
    Ok(world.mesh(&[("dp_outer", 2), ("dp_shard", 2)])?)
}

fn begun(world: &World) -> fsdp::Result<Training> {
    Training::begun(&mesh(world)?, &config(Strategy::default()))
}

/// The ranks that `deviates` names take `plan` in their third step.
fn steps(
    deviates: impl Fn(usize) -> bool + Send + Sync,
    plan: Plan,
) -> impl Fn(&World) -> fsdp::Result<()> + Send + Sync {
    move |world| {
        let mut training = begun(world)?;
        let plan = if deviates(world.rank()) { plan.clone() } else { Plan::default() };
        training.step(&plan)?;
        training.go_on()
    }
}

/// Ranks 2 and 3.
fn second_replica(rank: usize) -> bool {
    rank >= 2
}

#[test]
fn one_rank_of_an_inner_group_calls_units_in_another_order() {
    let ends = at_once(4, steps(|rank| rank == 3, Plan::order([1, 0, 2, 3])));
    let parts = [
        "of ranks [2, 3]",
        "of unit `layers.0` (backward, step 3",
        "`layers.1`",
        "rank 2 is in",
        "rank 3 in",
    ];
    ends.every_rank_says(&parts);
}

#[test]
fn a_whole_replica_calls_units_in_another_order() {
    let ends = at_once(4, steps(second_replica, Plan::order([0, 2, 1, 3])));
    ends.every_rank_says(&["all-reduce of unit `layers.1`", "`layers.2`", "of ranks [", "backward, step 3"]);
}

#[test]
fn a_whole_replica_leaves_a_unit_out() {
    let ends = at_once(4, steps(second_replica, Plan::order([0, 1, 3])));
    ends.every_rank_says(&["all-reduce of unit `layers.", "`layers.2`", "of ranks [", "backward, step 3"]);
}

#[test]
fn a_whole_replica_leaves_a_step_out() {
    let ends = at_once(4, |world| {
        let mut training = begun(world)?;
        training.microbatch(&Plan::default())?;
        if second_replica(world.rank()) {
            training.model.reset_step()?;
        } else {
            training.optimize()?;
        }
        training.go_on()
    });
    ends.every_rank_says(&["all-reduce of unit `layers.", "step 3", "step 4", "of ranks ["]);
}

#[test]
fn a_whole_replica_clips_alone() {
    let ends = at_once(4, |world| {
        let mut training = begun(world)?;
        training.microbatch(&Plan::default())?;
        if second_replica(world.rank()) {
            training.model.clip_grad_norm(1.0)?;
        }
        training.optimize()?;
        training.go_on()
    });
    ends.every_rank_says(&["the ranks wait for each other", "`gradient norm` (optimizer, step 3", "step 4"]);
}

#[test]
fn an_outer_group_does_not_know_the_last_microbatch() {
    // Ranks 1 and 3 hold the same shard.
    let ends = at_once(4, |world| {
        let mut training = begun(world)?;
        training.model.set_is_last_microbatch(world.rank() == 3);
        training.microbatch(&Plan::default())?;
        training.optimize()?;
        training.go_on()
    });
    ends.every_rank_says(&[
        "all-gather of unit `layers.0`",
        "in a microbatch that is not the last",
        "rank 3 is ",
    ]);
}

#[test]
fn one_rank_panics() {
    let ends = at_once(4, steps(|rank| rank == 3, Plan::with(true, Place::Backward, Mishap::Panic)));
    ends.all_but(3, &["rank 3 panicked: boom", "last seen in", "of unit `layers."]);
}

#[test]
fn one_rank_is_late() {
    let ends = in_time(4, steps(|rank| rank == 3, Plan::with(true, Place::Forward, Mishap::Sleep)));
    let ends = ends.every_rank_says(&["rank 3 was last seen", "of unit `layers.", "step 3"]);
    // Who waits for rank 2, which waits for rank 3 itself, is told so.
    let error = ends.errors[0].as_ref().unwrap();
    assert!(error.contains("missing: [3]") || error.contains("rank 2 itself waits in "), "{error}");
}

#[test]
fn other_mesh_dims_on_one_rank() {
    let ends = at_once(4, |world| {
        let mesh = if world.rank() == 3 { world.data_parallel_mesh() } else { mesh(world)? };
        layers(2).fully_shard(&mesh).map(drop)
    });
    ends.every_rank_says(&[
        "the ranks differ",
        "rank 3 has mesh dp_shard=4",
        "has mesh dp_outer=2 x dp_shard=2",
    ]);
}

#[test]
fn another_outer_strategy_on_one_replica() {
    let ends = at_once(4, |world| {
        let outer = if second_replica(world.rank()) { OuterStrategy::Optim } else { OuterStrategy::NoShard };
        let config = FsdpConfig { outer, ..FsdpConfig::default() };
        layers(2).fully_shard_with(&mesh(world)?, &config).map(drop)
    });
    ends.every_rank_says(&["the ranks differ", "outer strategy no-shard", "outer strategy optim"]);
}
