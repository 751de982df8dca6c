//! A rank that is lost or late in training: the others end soon, with words of which rank, where and in what step.

use std::time::{Duration, Instant};

use fake_cuda::{Finding, Kind, Schedule, Session};
use fsdp_runtime::launch::LaunchError;
use fsdp_test_fake_cuda::schedules;

use crate::place::Shared;
use crate::rank::Fuse;
use crate::setting::Setting;
use crate::{Joined, Run, place, plain};

/// Uses of units until unit 2 runs its forward in the second step: the root and three units forward, three backward, and
/// the root and one.
const UNTIL_UNIT_2: usize = 4 + 3 + 2;

/// Rank 1 of three comes to unit 2 and calls `blow`; nothing is gathered ahead. What each rank says.
fn words(
    joined: Joined,
    schedule: Schedule,
    timeout: Duration,
    blow: fn(&Shared) -> crate::comm::CommError,
) -> Vec<String> {
    let session = Session::new(schedule);
    place::register(&session);
    let setting = Setting { prefetch: 0, ..plain(3) };
    let fuse = Some((1, Fuse { uses: UNTIL_UNIT_2, blow }));
    let start = Instant::now();
    // It joins the threads of all ranks, the watchdogs of NCCL among them.
    let end = Run { fuse, timeout, ..Run::new(setting, joined) }.train();
    assert!(start.elapsed() < Duration::from_secs(15), "took {:?}", start.elapsed());
    let Err(LaunchError::Ranks { first, others }) = end else { panic!("{end:?}") };
    place::take_wrong();
    // Of devices that have failed nothing but memory is left behind: it may be in use.
    let memory = |finding: &Finding| finding.kind == Kind::Leak && finding.message.contains("memory");
    assert!(session.take_findings().iter().all(memory));
    let mut ends: Vec<_> =
        std::iter::once(first).chain(others).map(|end| (end.rank, end.to_string())).collect();
    ends.sort();
    assert_eq!(ends.len(), 3, "{ends:?}");
    ends.into_iter().map(|(_, words)| words).collect()
}

fn assert_say(words: &[String], expected: &[&str]) {
    for rank in [0, 2] {
        for part in expected {
            assert!(words[rank].contains(part), "rank {rank} does not say {part:?}: {}", words[rank]);
        }
    }
}

#[test]
fn a_rank_that_panics_in_a_forward_ends_the_others_at_the_next_gather() {
    for joined in [Joined::OneDevice, Joined::Nccl] {
        for schedule in schedules(2) {
            let words = words(joined, schedule, Duration::from_secs(60), |_| panic!("boom"));
            assert!(words[1].contains("boom"), "{}", words[1]);
            assert_say(&words, &["rank 1 panicked: boom"]);
        }
    }
}

/// The rank neither calls nor fails until the others have given up.
#[test]
fn a_rank_that_is_late_for_a_gather_is_named_with_unit_phase_and_step() {
    for schedule in schedules(2) {
        let words = words(Joined::Nccl, schedule, Duration::from_secs(1), |place| {
            loop {
                match place.device().check() {
                    Ok(()) => std::thread::sleep(Duration::from_millis(5)),
                    Err(error) => return error,
                }
            }
        });
        let expected = [
            "timed out after 1s in all-gather of unit `2` (forward, step 2, 192 B)",
            "called by: [0, 2], missing: [1]",
        ];
        assert_say(&words, &expected);
    }
}
