//! Ranks whose models, settings or calls of units differ.

use fsdp::prelude::*;

use super::{Layer, Layers, Plan, Training, at_once, layers};
use crate::fixtures::config;

/// Rank 1 of 3 calls the layers in `order`, in the first step, or in the third, when the order was learnt and
/// gathers come ahead of the calls.
#[track_caller]
fn diverges(order: &[usize], first: &[&str], learnt: &[&str]) {
    for begun in [false, true] {
        let ends = at_once(3, |world| {
            let config = FsdpConfig { double_buffer: false, ..config(Strategy::default()) };
            let mesh = world.data_parallel_mesh();
            let mut training = if begun {
                Training::begun(&mesh, &config)?
            } else {
                Training::of(layers(5).fully_shard_with(&mesh, &config)?)?
            };
            let other = Plan::order(order);
            let plan = if world.rank() == 1 { other } else { Plan::default() };
            training.step(&plan)?;
            training.go_on()
        });
        let step = if begun { "step 3" } else { "step 1" };
        ends.every_rank_says(&["differs: rank ", "rank 1", step]).every_rank_says(if begun {
            learnt
        } else {
            first
        });
    }
}

#[test]
fn units_in_another_order() {
    let gathers = ["all-gather of unit `layers.0` (forward", "all-gather of unit `layers.1` (forward"];
    diverges(&[1, 0, 2, 3], &gathers, &["of unit `layers.0` (backward", "of unit `layers.1` (backward"]);
}

#[test]
fn a_unit_left_out() {
    let gathers = ["all-gather of unit `layers.1` (forward", "all-gather of unit `layers.2` (forward"];
    diverges(&[0, 2, 3], &gathers, &["of unit `layers.1` (backward"]);
}

#[test]
fn the_last_unit_left_out() {
    let gathers = ["all-gather of unit `layers.3` (forward", "(backward"];
    diverges(&[0, 1, 2], &gathers, &["of unit `layers.3` (backward", "of unit `layers.2` (backward"]);
}

#[test]
fn another_unit() {
    let gathers = ["all-gather of unit `layers.3` (forward", "all-gather of unit `layers.4` (forward"];
    diverges(&[0, 1, 2, 4], &gathers, &["of unit `layers.4` ("]);
}

#[test]
fn a_unit_called_twice() {
    let gathers = ["all-gather of unit `layers.0` (forward", "all-gather of unit `layers.1` (forward"];
    diverges(&[0, 0, 1, 2, 3], &gathers, &["all-gather of unit `layers.0` (forward", "`layers.2` (forward"]);
}

#[test]
fn a_unit_called_again_later() {
    let gathers = ["all-gather of unit `layers.0` (forward", "all-gather of unit `layers.", "(backward"];
    diverges(&[0, 1, 2, 3, 0], &gathers, &gathers);
}

/// Rank 1 of 3 shards another model, or with other settings.
#[track_caller]
fn shards_otherwise(
    make: impl Fn(bool) -> Layers + Send + Sync,
    config: impl Fn(bool) -> FsdpConfig + Send + Sync,
    parts: &[&str],
) {
    let ends = at_once(3, |world| {
        let other = world.rank() == 1;
        make(other).fully_shard_with(&world.data_parallel_mesh(), &config(other))?;
        Ok(())
    });
    ends.every_rank_says(&["the ranks differ", "rank 1"]).every_rank_says(parts);
}

/// Two layers, the second made by `second`.
fn two(second: Unit<Layer>) -> Layers {
    let mut two = layers(1);
    two.layers.push(second);
    two
}

#[test]
fn another_shape_of_a_parameter() {
    let make = |other| two(Unit::new(Layer { w: Param::new(if other { 41 } else { 40 }) }));
    shards_otherwise(make, |_| FsdpConfig::default(), &["`layers.1.w`", "[40]", "[41]"]);
}

#[test]
fn another_dtype_of_a_parameter() {
    let dtype = |other| if other { Dtype::BF16 } else { Dtype::F32 };
    let make = |other| two(Unit::new(Layer { w: Param::new(40).with_dtype(dtype(other)) }));
    shards_otherwise(make, |_| FsdpConfig::default(), &["`layers.1.w`", "bf16", "f32"]);
}

#[test]
fn another_number_of_units() {
    shards_otherwise(|other| layers(if other { 3 } else { 2 }), |_| FsdpConfig::default(), &["`layers.2"]);
}

#[test]
fn a_parameter_that_is_frozen_on_one_rank() {
    let make = |frozen: bool| {
        let model = layers(2);
        model.layers[1].w.set_requires_grad(!frozen).unwrap();
        model
    };
    shards_otherwise(make, |_| FsdpConfig::default(), &["`layers.1.w`", "frozen"]);
}

#[test]
fn a_unit_recomputed_on_one_rank() {
    let make = |other: bool| {
        let unit = Unit::new(Layer { w: Param::new(40) });
        two(if other { unit.recompute(Recompute::Unit) } else { unit })
    };
    let parts = ["`layers.1`", "None recomputation", "Unit recomputation"];
    shards_otherwise(make, |_| FsdpConfig::default(), &parts);
}

#[test]
fn a_unit_kept_after_forward_on_one_rank() {
    let make = |other: bool| {
        let unit = Unit::new(Layer { w: Param::new(40) });
        two(if other { unit.reshard_after_forward(ReshardAfterForward::Never) } else { unit })
    };
    shards_otherwise(make, |_| FsdpConfig::default(), &["`layers.1`", "Never", "Always"]);
}

#[test]
fn other_settings() {
    let with = |config: fn(&mut FsdpConfig)| {
        move |other| {
            let mut settings = FsdpConfig::default();
            if other {
                config(&mut settings);
            }
            settings
        }
    };
    let make = |_| layers(2);
    shards_otherwise(make, with(|c| c.double_buffer = false), &["double buffer false", "double buffer true"]);
    shards_otherwise(make, with(|c| c.prefetch = 2), &["prefetch 1", "prefetch 2"]);
    shards_otherwise(
        make,
        with(|c| c.strategy = Strategy::Optim),
        &["strategy optim", "strategy optim-grads-params"],
    );
    shards_otherwise(make, with(|c| c.seed = 7), &["seed 0", "seed 7"]);
}

/// Rank 1 of 3 steps with another optimizer than the others.
#[track_caller]
fn steps_otherwise(
    step: impl Fn(bool, &mut Fsdp<Layers>) -> fsdp::Result<bool> + Send + Sync,
    parts: &[&str],
) {
    let ends = at_once(3, |world| {
        let mut model = layers(2).fully_shard(&world.data_parallel_mesh())?;
        let loss = model.forward(&Plan::order([0, 1]))?;
        model.backward(&loss)?;
        step(world.rank() == 1, &mut model)?;
        Ok(())
    });
    ends.every_rank_says(&["the ranks differ", "rank 1"]).every_rank_says(parts);
}

#[test]
fn another_optimizer() {
    steps_otherwise(
        |other, model| {
            if other {
                model.optimizer(AdamW::default())?.step(model)
            } else {
                model.optimizer(Sgd::default())?.step(model)
            }
        },
        &["optimizer sgd", "optimizer adamw"],
    );
}

#[test]
fn another_learning_rate() {
    let rate = |other| if other { 0.5 } else { 0.25 };
    steps_otherwise(
        |other, model| model.optimizer(Sgd::default().lr(rate(other)))?.step(model),
        &["learning rate 0.5", "learning rate 0.25"],
    );
}

#[test]
fn another_weight_decay() {
    let decay = |other| if other { 0.5 } else { 0.25 };
    steps_otherwise(
        |other, model| model.optimizer(AdamW::default().weight_decay(decay(other)))?.step(model),
        &["weight decay 0.5", "weight decay 0.25"],
    );
}
