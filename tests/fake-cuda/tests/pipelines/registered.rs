//! Pools whose buffers are registered with the communicators that use them.

use fake_cuda::{Schedule, Session};
use fsdp_test_fake_cuda::{schedules, share};

use crate::comm::Registration;
use crate::setting::Setting;
use crate::spec::{OuterStrategy, Strategy};
use crate::{Joined, Run, drawn, place, plain, setting};

const HOW: [Registration; 2] = [Registration::Buffer, Registration::Window];

#[test]
fn ranks_whose_pools_are_registered_train() {
    for (inner, outer, runs) in [(1, 1, 4), (2, 1, 20), (2, 2, 10), (4, 1, 10)] {
        for seed in 0..share(runs) {
            let session = Session::new(drawn(seed));
            place::register(&session);
            let setting = Setting { double_buffer: true, ..setting(inner, outer, seed) };
            let how = HOW[seed as usize / 3 % 2];
            let run = Run { registration: Some(how), ..Run::new(setting, Joined::Nccl) };
            if let Err(error) = run.train() {
                panic!("seed {seed}: {error}");
            }
            if let Some(wrong) = place::take_wrong() {
                panic!("seed {seed}: {wrong}");
            }
        }
    }
}

/// Among them those of neighbours who gather what they have kept.
#[test]
fn every_collective_of_a_pool_has_registered_memory() {
    for schedule in schedules(2) {
        for how in HOW {
            let session = Session::new(schedule);
            place::register(&session);
            session.start_log();
            Run { registration: Some(how), ..Run::new(plain(4), Joined::Nccl) }.train().unwrap();
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

/// Each outer rank alone has its shards whole, so that every collective is of outer ranks: those that gather the weights
/// inner ranks', which work on the pools.
#[test]
fn every_collective_of_outer_ranks_has_registered_memory() {
    for (outer_strategy, names) in [
        (OuterStrategy::NoShard, &["ncclAllReduce"][..]),
        (OuterStrategy::Optim, &["ncclAllGather", "ncclReduceScatter"]),
    ] {
        for how in HOW {
            let session = Session::new(Schedule::Latest);
            place::register(&session);
            session.start_log();
            let setting = Setting { outer: 2, outer_strategy, ..plain(2) };
            Run { registration: Some(how), ..Run::new(setting, Joined::Nccl) }.train().unwrap();
            assert_eq!(place::take_wrong(), None);
            let calls: Vec<String> =
                session.operations().into_iter().map(|operation| operation.call).collect();
            for name in names {
                let outer: Vec<_> = calls.iter().filter(|call| call.contains(name)).collect();
                let registered = format!("{name} of registered memory");
                assert!(!outer.is_empty() && outer.iter().all(|call| **call == registered), "{outer:?}");
            }
        }
    }
}

#[test]
fn pools_that_cannot_be_registered_are_refused() {
    let refused = |setting: Setting, joined: Joined, why: &str| {
        let session = Session::new(Schedule::Latest);
        place::register(&session);
        let run = Run { registration: Some(Registration::Buffer), ..Run::new(setting, joined) };
        let error = run.train().unwrap_err().to_string();
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
    let run = Run { registration: Some(Registration::Buffer), ..Run::new(none, Joined::OneDevice) };
    run.train().unwrap();
    assert_eq!(place::take_wrong(), None);
}
