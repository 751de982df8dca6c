//! The pipelines: what is handed out is the unit's present weights, no buffer is written while it is read,
//! sums are exact, and everything ends.

mod host;
mod rank;
mod setting;

use self::host::Host;
use self::rank::{Fuse, Rank};
use self::setting::Setting;
use crate::check::{check, choose};
use crate::launch::LaunchError;
use crate::rendezvous::launch;

/// Two steps of training on `inner * outer` ranks, in a way that the checker chooses anew for each schedule.
pub fn train(inner: usize, outer: usize, schedules: usize) {
    match (inner, outer) {
        (2, 1) => check(schedules, || trained(2, 1)),
        (1, 2) => check(schedules, || trained(1, 2)),
        (2, 2) => check(schedules, || trained(2, 2)),
        _ => check(schedules, || trained(4, 1)),
    }
}

fn trained(inner: usize, outer: usize) {
    let setting = Setting::choose(inner, outer);
    let outcome =
        launch(inner * outer, |world| Rank::new(Host, setting, &**world.communicator(), None)?.train());
    assert!(outcome.is_ok(), "{setting:?}: {}", outcome.unwrap_err());
}

/// The same where one rank fails on the way: all fail, none waits for ever.
pub fn fail_together(schedules: usize) {
    check(schedules, || {
        let setting = Setting::choose(2, 1);
        let (culprit, fuse) = (choose(2), choose(6));
        let outcome = launch(2, |world| {
            let fuse = (world.rank() == culprit).then(|| Fuse::new(fuse));
            Rank::new(Host, setting, &**world.communicator(), fuse)?.train()
        });
        let Err(LaunchError::Ranks { first, others }) = outcome else { panic!("{setting:?}: {outcome:?}") };
        assert_eq!((first.rank, others.len()), (culprit, 1), "{setting:?}: {first}, {others:?}");
    });
}
