//! A rank that is late beyond the time-out: it is missed by name, and learns of it when it comes.

use fsdp::prelude::*;

use super::{Mishap, Place, Plan, SLEEP, Training, in_time};
use crate::fixtures::config;

/// Rank 1 of 3 is late in its third step, before, in or after the forward, as `main` has it.
#[track_caller]
fn misses(parts: &[&str], main: impl Fn(bool, &mut Training) -> fsdp::Result<()> + Send + Sync) {
    let ends = in_time(3, |world| {
        let mut training = Training::begun(&world.data_parallel_mesh(), &config(Strategy::default()))?;
        main(world.rank() == 1, &mut training)?;
        training.go_on()
    });
    ends.every_rank_says(&["missing: [1]", "rank 1 was last seen", "step 3"]).every_rank_says(parts);
}

fn sleep(late: bool) {
    if late {
        std::thread::sleep(SLEEP);
    }
}

#[test]
fn late_in_forward() {
    misses(&["of unit `layers."], |late, training| {
        training.step(&Plan::with(late, Place::Forward, Mishap::Sleep))
    });
}

#[test]
fn late_before_a_gather_that_nothing_has_started_ahead() {
    let ends = in_time(2, |world| {
        let config = FsdpConfig { prefetch: 0, ..config(Strategy::default()) };
        let mut training = Training::begun(&world.data_parallel_mesh(), &config)?;
        training.step(&Plan::with(world.rank() == 1, Place::Forward, Mishap::Sleep))?;
        training.go_on()
    });
    // Operation, unit, phase, step, bytes, who is there and who is not.
    let parts = ["in all-gather of unit `layers.3` (forward, step 3, 256 B)", "arrived: [0], missing: [1]"];
    ends.every_rank_says(&parts);
}

#[test]
fn late_before_the_backward() {
    misses(&["of unit `layers.", "backward"], |late, training| {
        let loss = training.model.forward(&Plan::default())?;
        sleep(late);
        training.model.backward(&loss)?;
        training.optimize()
    });
}

#[test]
fn late_in_backward() {
    misses(&["of unit `layers.", "backward"], |late, training| {
        training.step(&Plan::with(late, Place::Backward, Mishap::Sleep))
    });
}

#[test]
fn late_before_the_step() {
    misses(&["in all-gather of unit `layers.0` (forward, step 4"], |late, training| {
        training.microbatch(&Plan::default())?;
        sleep(late);
        training.optimize()
    });
}

#[test]
fn late_between_steps() {
    misses(&["in all-gather of unit `layers.0` (forward, step 3"], |late, _| {
        sleep(late);
        Ok(())
    });
}

#[test]
fn late_inside_full_parameters() {
    misses(&["in host-gather of `layers.1` (setup, step 3"], |late, training| {
        training.model.with_full_params("layers.1", |_| {
            sleep(late);
            Ok(())
        })
    });
}
