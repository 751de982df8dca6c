//! A rank that is lost, late or somewhere else ends as an error on every rank, soon, that says which and where.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use fake_cuda::{Kind, Schedule, Session};
use fsdp_runtime::comm::{CommError, Communicator, Exchange, Gather};
use fsdp_runtime::device::{Slice, Stream};
use fsdp_runtime::launch::LaunchError;
use fsdp_runtime::spec::Dtype;
use fsdp_test_fake_cuda::schedules;
use parking_lot::Mutex;

use super::world::{Outcome, Rank, launch, run, tag};

pub const SOON: Duration = Duration::from_secs(1);

/// An all-reduce that the host waits for.
pub fn all_reduce(rank: &Rank, comm: &dyn Communicator, unit: &str) -> Outcome<()> {
    let data = rank.upload(Dtype::F32, &[1.0; 4])?;
    rank.hand_over()?;
    comm.all_reduce(&*rank.side, tag(unit), vec![(data.clone(), 1.0)])?;
    assert_eq!(rank.download(&data)?, [rank.size() as f32; 4]);
    Ok(())
}

/// The words of each rank that failed.
fn texts(error: LaunchError) -> Vec<(usize, String)> {
    match error {
        LaunchError::Ranks { first, others } => {
            std::iter::once(first).chain(others).map(|failure| (failure.rank, failure.to_string())).collect()
        }
        other => panic!("{other}"),
    }
}

/// Launches, and checks that all ranks but `lost` fail soon with all of `words` in their message. Of devices that have
/// failed nothing but memory is left behind: it may be in use.
fn all_but_one_fail(
    session: &Session,
    ranks: usize,
    timeout: Duration,
    lost: usize,
    words: &[&str],
    body: impl Fn(&Rank) -> Outcome<()> + Sync,
) {
    let start = Instant::now();
    let error = launch(ranks, timeout, body).expect_err("a rank is lost");
    assert!(start.elapsed() < Duration::from_secs(15), "took {:?}", start.elapsed());
    let texts = texts(error);
    for rank in (0..ranks).filter(|rank| *rank != lost) {
        let text = &texts.iter().find(|(failed, _)| *failed == rank).expect("it has failed").1;
        for word in words {
            assert!(text.contains(word), "rank {rank} does not say {word:?}: {text}");
        }
    }
    expect_memory_only(session);
}

pub fn expect_memory_only(session: &Session) {
    for finding in session.take_findings() {
        assert!(finding.kind == Kind::Leak && finding.message.contains("memory"), "{finding}");
    }
}

#[test]
fn a_rank_that_fails_or_panics_ends_the_others_waits_for_the_device() {
    for schedule in schedules(3) {
        for panics in [false, true] {
            let session = Session::new(schedule);
            let how = if panics { "rank 1 panicked: boom" } else { "rank 1 failed: boom" };
            all_but_one_fail(
                &session,
                3,
                Duration::from_secs(60),
                1,
                &[how, "all-reduce of unit `layers.0`"],
                |rank| {
                    let comm = rank.join()?;
                    all_reduce(rank, &*comm, "layers.0")?;
                    match rank.rank() {
                        1 if panics => panic!("boom"),
                        1 => Err("boom".into()),
                        _ => all_reduce(rank, &*comm, "layers.1"),
                    }
                },
            );
        }
    }
}

#[test]
fn a_rank_that_returns_early_is_named() {
    let session = Session::new(Schedule::Latest);
    let words =
        ["rank 2 returned early", "waits for it in all-reduce of unit `layers.1` (forward, step 1, 16 B)"];
    all_but_one_fail(&session, 3, Duration::from_secs(60), 2, &words, |rank| {
        let comm = rank.join()?;
        all_reduce(rank, &*comm, "layers.0")?;
        if rank.rank() == 2 { Ok(()) } else { all_reduce(rank, &*comm, "layers.1") }
    });
}

/// The rank neither calls nor fails until the others have given up.
#[test]
fn a_rank_that_is_late_is_named() {
    for schedule in schedules(3) {
        let session = Session::new(schedule);
        let (ended, others_end) = mpsc::channel();
        let (ended, others_end) = (Mutex::new(ended), Mutex::new(others_end));
        let words = [
            "timed out after 1s in all-reduce of unit `layers.1` (forward, step 1, 16 B), collective #3 of channel `world`",
            "called by: [0, 2], missing: [1]",
            "rank 1 was last seen: channel `world`: #2 all-reduce of unit `layers.0`",
        ];
        all_but_one_fail(&session, 3, SOON, 1, &words, |rank| {
            let comm = rank.join()?;
            all_reduce(rank, &*comm, "layers.0")?;
            if rank.rank() == 1 {
                let others_end = others_end.lock();
                (0..2).try_for_each(|_| others_end.recv())?;
                return Ok(());
            }
            let end = all_reduce(rank, &*comm, "layers.1");
            ended.lock().send(())?;
            end
        });
    }
}

/// What is done is forgotten, however much of it there is.
#[test]
fn a_rank_that_is_late_after_many_collectives_is_named_as_soon() {
    let session = Session::new(Schedule::Earliest);
    let (ended, others_end) = mpsc::channel();
    let (ended, others_end) = (Mutex::new(ended), Mutex::new(others_end));
    let words = ["timed out after 1s in all-reduce of unit `last`", "called by: [0], missing: [1]"];
    all_but_one_fail(&session, 2, SOON, 1, &words, |rank| {
        let comm = rank.join()?;
        (0..200).try_for_each(|i| all_reduce(rank, &*comm, &format!("layers.{i}")))?;
        if rank.rank() == 1 {
            return Ok(others_end.lock().recv()?);
        }
        let end = all_reduce(rank, &*comm, "last");
        ended.lock().send(())?;
        end
    });
}

/// The rank has called, but its device is busy with something else.
#[test]
fn a_device_that_does_not_come_to_the_collective_is_named() {
    let session = Session::new(Schedule::Latest);
    let words =
        ["timed out after 1s in all-reduce of unit `layers.0`", "the devices of [0] have not come to it"];
    all_but_one_fail(&session, 2, SOON, 2, &words, |rank| {
        let comm = rank.join()?;
        let (end, ended) = mpsc::channel();
        if rank.rank() == 0 {
            // Longer than the others' patience. The fake runs it in whichever thread looks for progress.
            rank.side.submit(Box::new(move || {
                std::thread::sleep(3 * SOON);
                drop(end);
                Ok(())
            }))?;
        } else {
            drop(end);
        }
        let failed = all_reduce(rank, &*comm, "layers.0");
        // The call has a hold on the device, and lets go a moment later.
        let _: Result<(), _> = ended.recv();
        std::thread::sleep(SOON / 10);
        failed
    });
}

/// NCCL loses a rank: it says so, or nobody does.
#[test]
fn a_rank_that_nccl_loses_ends_all() {
    for schedule in schedules(3) {
        for reported in [true, false] {
            let session = Session::new(schedule);
            session.lose_device(1, 2, reported);
            let what = match reported {
                true => "remote process exited or there was a network error",
                false => "timed out after 1s",
            };
            let words =
                [what, "in all-reduce of unit `layers.2`", "called by all; NCCL_DEBUG=WARN may tell more"];
            all_but_one_fail(&session, 3, SOON, 3, &words, |rank| {
                let comm = rank.join()?;
                (0..4).try_for_each(|i| all_reduce(rank, &*comm, &format!("layers.{i}")))
            });
        }
    }
}

#[test]
fn a_device_that_fails_ends_the_other_ranks() {
    let session = Session::new(Schedule::Latest);
    let words = ["rank 1 failed: stream `side`: work panicked: boom"];
    all_but_one_fail(&session, 3, Duration::from_secs(60), 1, &words, |rank| {
        let comm = rank.join()?;
        all_reduce(rank, &*comm, "layers.0")?;
        if rank.rank() == 1 {
            rank.side.submit(Box::new(|| panic!("boom")))?;
            while rank.device.check().is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        all_reduce(rank, &*comm, "layers.1")
    });
}

#[test]
fn ranks_that_call_different_collectives_are_told_at_once() {
    type Body = fn(&Rank, &dyn Communicator) -> Outcome<()>;
    let cases: [(&str, Body); 4] = [
        (
            "rank 0 is in all-reduce of unit `a` (forward, step 1, 16 B), rank 1 in all-reduce of unit `b`",
            |rank, comm| all_reduce(rank, comm, ["a", "b"][rank.rank()]),
        ),
        (
            "part 0 is 4 x f32, scale 1, overwriting on rank 0, 4 x f32, scale 2, overwriting on rank 1",
            |rank, comm| {
                let data = rank.zeros(Dtype::F32, 4)?;
                rank.hand_over()?;
                comm.all_reduce(&*rank.side, tag("a"), vec![(data.clone(), 1.0 + rank.rank() as f32)])?;
                rank.download(&data).map(drop)
            },
        ),
        (
            "rank 0 is in all-reduce of unit `a` (forward, step 1, 16 B), rank 1 in host-barrier of `a`",
            |rank, comm| match rank.rank() {
                0 => all_reduce(rank, comm, "a"),
                _ => Ok(comm.host_barrier(tag("a"))?),
            },
        ),
        ("rank 0 is steps 1; rank 1 is steps 2", |rank, comm| {
            comm.note(&format!("steps {}", rank.rank() + 1));
            all_reduce(rank, comm, "a")
        }),
    ];
    for (words, body) in cases {
        let session = Session::new(Schedule::Latest);
        all_but_one_fail(
            &session,
            2,
            Duration::from_secs(60),
            2,
            &["collective #2 of channel `world` differs: ", words],
            |rank| body(rank, &*rank.join()?),
        );
    }
}

/// Lengths or dtypes that NCCL itself would take for what they are not: nothing that comes of it is handed out.
#[test]
fn ranks_whose_buffers_differ_get_no_garbage() {
    type Brought = fn(&Rank) -> (Dtype, usize);
    let cases: [(&str, Brought); 3] = [
        ("part 0 is 8 x f32 on rank 0, 10 x f32 on rank 1", |rank| (Dtype::F32, 8 + 2 * rank.rank())),
        ("part 0 is 8 x f32 on rank 0, 8 x bf16 on rank 1", |rank| {
            ([Dtype::F32, Dtype::BF16][rank.rank()], 8)
        }),
        ("part 0 is 8 x f32 on rank 0, 16 x bf16 on rank 1", |rank| {
            [(Dtype::F32, 8), (Dtype::BF16, 16)][rank.rank()]
        }),
    ];
    for (words, buffer) in cases {
        let session = Session::new(Schedule::Latest);
        let words = [words, "all-to-all of unit `tokens` (forward, step 1, "];
        all_but_one_fail(&session, 2, Duration::from_secs(60), 2, &words, |rank| {
            let (comm, (dtype, len)) = (rank.join()?, buffer(rank));
            let (send, recv) = (rank.zeros(dtype, len)?, rank.zeros(dtype, len)?);
            rank.hand_over()?;
            comm.all_to_all(&*rank.side, tag("tokens"), vec![Exchange { send, recv: recv.clone() }])?;
            rank.download(&recv).map(drop)
        });
    }
}

#[test]
fn a_rank_that_does_not_join_is_named() {
    let session = Session::new(Schedule::Latest);
    let words = ["timed out after 1s in host-gather of `id of NCCL`", "missing: [1]"];
    let (ended, others_end) = mpsc::channel();
    let (ended, others_end) = (Mutex::new(ended), Mutex::new(others_end));
    all_but_one_fail(&session, 3, SOON, 1, &words, |rank| {
        if rank.rank() == 1 {
            let others_end = others_end.lock();
            (0..2).try_for_each(|_| others_end.recv())?;
            return Ok(());
        }
        let joined = rank.join();
        ended.lock().send(())?;
        joined.map(drop)
    });
}

/// The group's communicator is made in its first collective, in which a rank is missing.
#[test]
fn a_rank_that_does_not_join_a_group_is_named() {
    let session = Session::new(Schedule::Latest);
    let words = ["rank 1 failed: boom"];
    all_but_one_fail(&session, 3, Duration::from_secs(60), 1, &words, |rank| {
        let comm = rank.join()?.duplicate("gather");
        if rank.rank() == 1 { Err("boom".into()) } else { all_reduce(rank, &*comm, "layers.0") }
    });
}

#[test]
fn what_does_not_fit_is_refused_and_nothing_is_sent() {
    let _session = Session::new(Schedule::Latest);
    run(2, |rank| {
        let comm = rank.join()?;
        let refused = |result: Result<(), CommError>, words: &str| {
            let error = result.expect_err(words);
            assert!(matches!(error, CommError::Invalid { .. } | CommError::Stream { .. }), "{error}");
            assert!(error.to_string().contains(words), "{error}");
        };
        let slice = |len| rank.zeros(Dtype::F32, len);
        let gather = |send, recv| comm.all_gather(&*rank.side, tag("a"), vec![Gather { send, recv }]);
        refused(gather(slice(2)?, slice(3)?), "recv has 3 elements, expected 2 ranks x 2 of send");
        refused(gather(rank.zeros(Dtype::BF16, 2)?, slice(4)?), "send is bf16, but recv is f32");
        let whole = slice(4)?;
        refused(
            gather(whole.range(1..3), whole.clone()),
            "send overlaps recv without being its part of rank",
        );
        // SAFETY: nothing uses it: the collectives are refused.
        let of_the_host = unsafe { Slice::zeros(Dtype::F32, 2, None) };
        refused(gather(of_the_host.clone(), slice(4)?), "Host memory in work of cuda:");
        let exchange = |send, recv| comm.all_to_all(&*rank.side, tag("a"), vec![Exchange { send, recv }]);
        refused(exchange(slice(3)?, slice(3)?), "3 elements cannot be cut into 2 equal chunks, one a rank");
        refused(exchange(whole.clone(), whole.clone()), "send and recv overlap, expected memory apart");
        refused(exchange(of_the_host, slice(2)?), "Host memory in work of cuda:");
        let stream = fsdp_runtime::device::cpu::ComputeStream::new("compute");
        refused(comm.broadcast(&*stream, tag("a"), slice(2)?, 0), "the stream is not one of cuda:");
        refused(comm.broadcast(&*rank.side, tag("a"), slice(2)?, 2), "there is no rank 2 among 2 ranks");
        all_reduce(rank, &*comm, "after that")
    });
}

/// Nothing is left behind by ranks that have failed: the session would say so.
#[test]
fn a_session_after_a_failure_is_a_new_one() {
    for schedule in schedules(3) {
        let session = Session::new(schedule);
        session.fail_allocation(20);
        let error = launch(2, Duration::from_secs(60), |rank| {
            let comm = rank.join()?;
            (0..20).try_for_each(|i| all_reduce(rank, &*comm, &format!("layers.{i}")))
        });
        let text = error.expect_err("memory is short").to_string();
        assert!(text.contains("16 bytes cannot be allocated"), "{text}");
        expect_memory_only(&session);
    }
    let _session = Session::new(Schedule::Latest);
    run(2, |rank| all_reduce(rank, &*rank.join()?, "layers.0"));
}
