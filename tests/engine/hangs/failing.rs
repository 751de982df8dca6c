//! A rank that fails by itself: with an error, by a panic, by leaving.

use std::time::Duration;

use candle_core::Tensor;
use fsdp::launch::{Launcher, World};
use fsdp::optim::{OptimError, Optimizer, Segment, StepInfo};
use fsdp::prelude::*;

use super::{Fate, LONG, Mishap, Place, Plan, Training, Trap, at_once, launch, layers};
use crate::fixtures::config;

fn train(world: &World, recompute: Recompute, place: Place, mishap: Mishap) -> fsdp::Result<()> {
    let config = FsdpConfig { recompute, ..config(Strategy::default()) };
    let mut training = Training::begun(&world.data_parallel_mesh(), &config)?;
    training.step(&Plan::with(world.rank() == 1, place, mishap))?;
    training.go_on()
}

/// The error of rank 1 of 3 says where it arose, and the others have it.
#[track_caller]
fn errs(recompute: Recompute, place: Place, phase: &str) {
    let ends = at_once(3, |world| train(world, recompute, place, Mishap::Error));
    ends.ranks_say(&[1], &["rank 1", "`layers.2`", phase, "step 3", "bang"]).ranks_say(
        &[0, 2],
        &["rank 1 failed: ", "`layers.2`", phase, "bang", "last seen in ", "of unit `layers."],
    );
}

#[test]
fn an_error_in_forward() {
    errs(Recompute::None, Place::Forward, "forward");
}

#[test]
fn an_error_in_backward() {
    errs(Recompute::None, Place::Backward, "backward");
}

#[test]
fn an_error_in_the_backward_of_what_is_in_no_unit() {
    let ends = at_once(3, |world| {
        let mut training = Training::begun(&world.data_parallel_mesh(), &config(Strategy::default()))?;
        let mishap = (world.rank() == 1).then_some((Place::Backward, Mishap::Error));
        let loss: Tensor = training.model.forward(&Plan::default())?;
        let loss = loss.apply_op1(Trap(Fate { mishap, ..Fate::default() }))?;
        training.model.backward(&loss)?;
        training.go_on()
    });
    ends.every_rank_says(&["rank 1", "unit `(root)`, backward, step 3: bang"]);
}

#[test]
fn an_error_in_recomputation() {
    errs(Recompute::Unit, Place::Recompute, "backward");
}

#[test]
fn an_error_in_the_optimizer_step() {
    let ends = at_once(3, |world| {
        let mut training = Training::begun(&world.data_parallel_mesh(), &config(Strategy::default()))?;
        if world.rank() == 1 {
            training.optimizer.set_learning_rate(-1.0);
        }
        training.go_on()
    });
    ends.every_rank_says(&["sgd: lr must be finite and at least 0, got -1"])
        .ranks_say(&[0, 2], &["rank 1 failed", "last seen in "]);
}

/// Rank 1 of 3 panics with `boom`; the others say so within a second.
#[track_caller]
fn panics(parts: &[&str], main: impl Fn(&World) -> fsdp::Result<()> + Send + Sync) {
    // The whole run takes some hundredths of a second; a machine that is busy elsewhere gets more tries.
    let run = || launch(&Launcher::new().timeout(LONG), 3, &main);
    let ends = (0..5).map(|_| run()).find(|ends| ends.took < Duration::from_secs(1));
    let ends = ends.expect("the ranks end within a second of the panic");
    assert!(ends.launch.starts_with("rank 1 panicked: boom\n"), "{}", ends.launch);
    ends.all_but(1, &["rank 1 panicked: boom", "last seen in "]).all_but(1, parts);
}

#[test]
fn a_panic_in_forward() {
    panics(&["all-gather of unit `layers."], |world| {
        train(world, Recompute::None, Place::Forward, Mishap::Panic)
    });
}

#[test]
fn a_panic_in_backward() {
    panics(&["of unit `layers."], |world| train(world, Recompute::None, Place::Backward, Mishap::Panic));
}

#[test]
fn a_panic_in_recomputation() {
    panics(&["of unit `layers."], |world| train(world, Recompute::Unit, Place::Recompute, Mishap::Panic));
}

#[test]
fn a_panic_between_steps() {
    panics(&["of unit `layers."], |world| {
        let mut training = Training::begun(&world.data_parallel_mesh(), &config(Strategy::default()))?;
        assert!(world.rank() != 1, "boom");
        training.go_on()
    });
}

/// An optimizer that panics in its second step where it is told to.
struct Fuse(bool);

impl Optimizer for Fuse {
    fn name(&self) -> &'static str {
        "fuse"
    }

    fn state_names(&self) -> &'static [&'static str] {
        &[]
    }

    fn update(&self, at: StepInfo, _: &mut Segment<'_>) {
        assert!(!self.0 || at.step < 2, "boom");
    }

    fn learning_rate(&self) -> f64 {
        0.0
    }

    fn set_learning_rate(&mut self, _: f64) {}

    fn validate(&self) -> Result<(), OptimError> {
        Ok(())
    }
}

#[test]
fn a_panic_in_the_optimizer_step() {
    panics(&["of unit `layers."], |world| {
        let mut model = layers(4).fully_shard(&world.data_parallel_mesh())?;
        let mut optimizer = model.optimizer(Fuse(world.rank() == 1))?;
        for _ in 0..4 {
            let loss = model.forward(&Plan::default())?;
            model.backward(&loss)?;
            optimizer.step(&mut model)?;
        }
        Ok(())
    });
}

#[test]
fn a_panic_inside_full_parameters() {
    panics(&["all-gather of unit `weights`"], |world| {
        let mut training = Training::begun(&world.data_parallel_mesh(), &config(Strategy::default()))?;
        training.model.with_full_params("layers.1", |_| {
            assert!(world.rank() != 1, "boom");
            Ok(())
        })?;
        training.go_on()
    });
}

#[test]
fn a_panic_while_weights_are_visited() {
    panics(&["all-gather of unit `weights`"], |world| {
        let training = Training::begun(&world.data_parallel_mesh(), &config(Strategy::default()))?;
        training.model.visit_weights(|spec, _| {
            assert!(world.rank() != 1 || spec.name != "layers.2.w", "boom");
            Ok(())
        })
    });
}

#[test]
fn a_panic_before_the_model_is_sharded() {
    let ends = at_once(3, |world| {
        assert!(world.rank() != 1, "boom");
        layers(2).fully_shard(&world.data_parallel_mesh()).map(drop)
    });
    ends.all_but(1, &["rank 1 panicked: boom"]);
}

#[test]
fn a_training_loop_that_returns_early() {
    let ends = at_once(3, |world| {
        let mut training = Training::begun(&world.data_parallel_mesh(), &config(Strategy::default()))?;
        if world.rank() == 1 {
            return Ok(());
        }
        training.go_on()
    });
    assert!(ends.launch.starts_with("rank 1 returned early"), "{}", ends.launch);
    ends.all_but(1, &["rank 1 returned early", "waits for it in all-gather of unit `layers.0`", "step 3"]);
}

#[test]
fn a_training_loop_that_returns_between_forward_and_backward() {
    let ends = at_once(3, |world| {
        let mut training = Training::begun(&world.data_parallel_mesh(), &config(Strategy::default()))?;
        if world.rank() == 1 {
            let _loss = training.model.forward::<_, Tensor>(&Plan::default())?;
            return Ok(());
        }
        training.go_on()
    });
    ends.all_but(1, &["rank 1 returned early", "backward", "of unit `layers.", "step 3"]);
}

#[test]
fn the_last_collectives_of_every_rank_are_told_when_asked() {
    let launcher = Launcher::new().timeout(LONG).trace(true);
    let ends = launch(&launcher, 3, |world| {
        let mut training = Training::begun(&world.data_parallel_mesh(), &config(Strategy::default()))?;
        training.go_on()?;
        training.step(&Plan::with(world.rank() == 1, Place::Backward, Mishap::Error))
    });
    for rank in [0, 2] {
        let error = ends.errors[rank].as_ref().unwrap();
        for rank in 0..3 {
            let head = format!("\nlast 32 collectives of rank {rank}:\n");
            let (_, listed) = error.split_once(&head).unwrap_or_else(|| panic!("{head} in {error}"));
            let listed = listed.lines().take_while(|line| line.starts_with("  "));
            let listed: Vec<&str> = listed.collect();
            assert_eq!(listed.len(), 32, "{error}");
            // The channel, the number in it, the operation, the unit, where in training, how far.
            let gather = |line: &&str| line.contains("all-gather of unit `layers.0` (forward, step 6, ");
            let line = listed.iter().find(|line| gather(line)).unwrap();
            assert!(line.contains("/gather #") && line.ends_with(", done"), "{line}");
        }
    }
    ends.every_rank_says(&["bang"]);
}
