//! Runs a program under many schedules.

use std::cell::Cell;

use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{DfsScheduler, PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, MaxSteps, Runner};

use crate::device::take_race;

std::thread_local! {
    /// Whether the program may draw random numbers: not where all schedules are tried.
    static DRAWS: Cell<bool> = const { Cell::new(true) };
}

/// Whether the program may draw random numbers.
pub(crate) fn draws() -> bool {
    DRAWS.get()
}

/// One of `0..count`, chosen by the checker.
pub(crate) fn choose(count: usize) -> usize {
    thread_rng().gen_range(0..count)
}

/// One of `values`, chosen by the checker.
pub(crate) fn choose_of<T: Copy>(values: &[T]) -> T {
    values[choose(values.len())]
}

/// Runs `program` under `schedules` schedules, half of them drawn step by step, half with a few changes of
/// priority at chosen points (Burckhardt et al., A Randomized Scheduler with Probabilistic Guarantees of
/// Finding Bugs, 2010), which finds what needs one thread to be very late. The seeds are fixed, other ones come
/// with `FSDP_MODEL_SEED`; `FSDP_MODEL_FACTOR` multiplies the schedules.
///
/// # Panics
/// If a schedule ends in a deadlock, in a panic that nobody catches, or with a race.
pub(crate) fn check(schedules: usize, program: impl Fn() + Send + Sync + Copy + 'static) {
    let seed = number("FSDP_MODEL_SEED", 20_100_313);
    let half = (schedules * number("FSDP_MODEL_FACTOR", 1) as usize).div_ceil(2);
    run(RandomScheduler::new_from_seed(seed, half), program);
    run(PctScheduler::new_from_seed(seed, 3, half), program);
}

/// Runs `program`, which draws no random numbers, under all its schedules, and returns their number.
pub(crate) fn check_all(program: impl Fn() + Send + Sync + Copy + 'static) -> usize {
    DRAWS.set(false);
    let count = run(DfsScheduler::new(None, false), program);
    DRAWS.set(true);
    count
}

fn run(scheduler: impl Scheduler + 'static, program: impl Fn() + Send + Sync + 'static) -> usize {
    let mut config = Config::new();
    // Of atomics nothing but the streams' count of queued items is left to the checker.
    config.silence_warnings = true;
    config.stack_size = 256 << 10;
    config.max_steps = MaxSteps::FailAfter(200_000);
    Runner::new(scheduler, config).run(move || {
        take_race();
        program();
        if let Some(race) = take_race() {
            panic!("{race}");
        }
    })
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}
