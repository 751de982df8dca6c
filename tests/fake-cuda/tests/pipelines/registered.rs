//! Pools whose buffers are registered with the communicators that use them.

use fake_cuda::{Schedule, Session};

use crate::comm::Registration;
use crate::pipeline::Sync;
use crate::setting::{Mode, Setting, Update, Use};
use crate::spec::{Dtype, Strategy};
use crate::{Joined, factor, place, schedules, setting, train_in};

const HOW: [Registration; 2] = [Registration::Buffer, Registration::Window];

#[test]
fn ranks_whose_pools_are_registered_train() {
    for (inner, outer, runs) in [(1, 1, 4), (2, 1, 20), (2, 2, 10), (4, 1, 10)] {
        for seed in 0..runs * factor() {
            let session = Session::new(schedules(seed));
            place::register(&session);
            let setting = Setting { double_buffer: true, ..setting(inner, outer, seed) };
            let how = HOW[seed as usize / 3 % 2];
            if let Err(error) = train_in(setting, seed, Joined::Nccl, None, Some(how)) {
                panic!("seed {seed}: {error}");
            }
            if let Some(wrong) = place::take_wrong() {
                panic!("seed {seed}: {wrong}");
            }
        }
    }
}

/// Units one after the other, in as few slots as there are.
fn plain(ranks: usize) -> Setting {
    const FORWARD: &[Use] =
        &[Use { unit: 1, inner: &[] }, Use { unit: 2, inner: &[] }, Use { unit: 3, inner: &[] }];
    Setting {
        strategy: Strategy::OptimGradsParams,
        depth: 2,
        prefetch: 1,
        budget: None,
        double_buffer: true,
        reshard: Mode::Mixed,
        wire: Dtype::F32,
        frozen: false,
        forwards: [FORWARD, FORWARD],
        microbatches: &[Sync::Step],
        skipped: None,
        evaluate: false,
        recompute: false,
        updates: [Update::Step, Update::Step],
        cut: None,
        ..setting(ranks, 1, 0)
    }
}

/// Among them those of neighbours who gather what they have kept.
#[test]
fn every_collective_of_a_pool_has_registered_memory() {
    for schedule in Schedule::all(2) {
        for how in HOW {
            let session = Session::new(schedule);
            place::register(&session);
            session.start_log();
            train_in(plain(4), 0, Joined::Nccl, None, Some(how)).unwrap();
            assert_eq!(place::take_wrong(), None);
            let calls: Vec<String> =
                session.operations().into_iter().map(|operation| operation.call).collect();
            for name in ["ncclAllGather", "ncclReduceScatter"] {
                let of_pools: Vec<_> = calls.iter().filter(|call| call.contains(name)).collect();
                assert!(of_pools.len() >= 4 * 2 * 4, "{of_pools:?}");
                let registered = format!("{name} of registered memory");
                assert!(of_pools.iter().all(|call| **call == registered), "{of_pools:?}");
            }
        }
    }
}

#[test]
fn pools_that_cannot_be_registered_are_refused() {
    let refused = |setting: Setting, joined: Joined, why: &str| {
        let session = Session::new(Schedule::Latest);
        place::register(&session);
        let error = train_in(setting, 0, joined, None, Some(Registration::Buffer)).unwrap_err().to_string();
        assert!(error.contains("the buffers of a pool cannot be registered: "), "{error}");
        assert!(error.contains(why), "{error}");
    };
    let come_and_go = Setting { double_buffer: false, ..plain(2) };
    refused(come_and_go, Joined::Nccl, "without `double_buffer` they come and go");
    refused(plain(2), Joined::OneDevice, "the ranks are not joined by NCCL");
    // Whole weights and gradients are no pool's.
    let none = Setting { strategy: Strategy::NoShard, ..come_and_go };
    let session = Session::new(Schedule::Latest);
    place::register(&session);
    train_in(none, 0, Joined::OneDevice, None, Some(Registration::Buffer)).unwrap();
    assert_eq!(place::take_wrong(), None);
}
