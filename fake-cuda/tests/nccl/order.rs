//! Collectives and other work on the streams of a rank.

use cudarc::nccl::sys::{self, ncclRedOp_t};
use fake_cuda::{Kind, Schedule, Session};

use super::world::{Element, Rank, at, check, launch};

const N: usize = 8;

/// Gathers on a side stream what the main stream has made, and computes with it there; the waits may be left out.
fn gather(rank: &Rank, before: bool, after: bool) -> Vec<f32> {
    let side = rank.context.new_stream_with_priority(-5).expect("a stream");
    let mut shard = rank.upload(&[0.0f32; N]);
    let full = rank.upload(&vec![-1.0f32; N * rank.ranks]);
    rank.context.synchronize().expect("all has run");
    rank.stream.memcpy_htod(&[1.0 + rank.rank as f32; N], &mut shard).expect("a copy");
    if before {
        side.wait(&rank.stream.record_event(None).expect("an event")).expect("a wait");
    }
    let stream = side.cu_stream().cast();
    // SAFETY: the buffers have the lengths of an all-gather of N.
    check(unsafe { sys::ncclAllGather(at(&shard), at(&full), N, f32::TYPE, rank.comm, stream) });
    if after {
        rank.stream.wait(&side.record_event(None).expect("an event")).expect("a wait");
    }
    let result = rank.stream.clone_dtoh(&full).expect("a copy");
    rank.context.synchronize().expect("all has run");
    result
}

fn expected(ranks: usize) -> Vec<f32> {
    (0..ranks).flat_map(|rank| [1.0 + rank as f32; N]).collect()
}

#[test]
fn with_all_waits_every_schedule_gives_the_same() {
    for schedule in Schedule::all(200) {
        let _session = Session::new(schedule);
        for result in launch(3, |rank| gather(rank, true, true)) {
            assert_eq!(result, expected(3), "{schedule:?}");
        }
    }
}

#[test]
fn a_gather_that_waits_for_nothing_gathers_stale_shards() {
    let session = Session::new(Schedule::Latest);
    let results = launch(3, |rank| gather(rank, false, true));
    assert!(results.iter().all(|result| result[..] == [0.0; 3 * N]));
    session.expect(Kind::Race, "ncclAllGather");
}

#[test]
fn a_reader_that_does_not_wait_for_the_gather_reads_what_was_there() {
    let session = Session::new(Schedule::Latest);
    let results = launch(3, |rank| gather(rank, true, false));
    assert!(results.iter().all(|result| result[..] == [-1.0; 3 * N]));
    session.expect(Kind::Race, "ncclAllGather");
}

#[test]
fn both_are_found_in_every_schedule() {
    for schedule in Schedule::all(20) {
        for (before, after) in [(false, true), (true, false)] {
            let session = Session::new(schedule);
            launch(2, |rank| gather(rank, before, after));
            session.expect(Kind::Race, "ncclAllGather");
        }
    }
}

#[test]
fn a_buffer_freed_during_a_collective_is_found() {
    for schedule in Schedule::all(5) {
        let session = Session::new(schedule);
        launch(2, |rank| {
            let side = rank.context.new_stream().expect("a stream");
            let buffer = rank.upload(&[1.0f32; N]);
            side.wait(&rank.stream.record_event(None).expect("an event")).expect("a wait");
            let (at, op) = (at(&buffer), ncclRedOp_t::ncclSum);
            // SAFETY: in place, N values.
            check(unsafe {
                sys::ncclAllReduce(at, at, N, f32::TYPE, op, rank.comm, side.cu_stream().cast())
            });
        });
        session.expect(Kind::FreeInFlight, "without waiting for ncclAllReduce");
    }
}

/// Ranks may reach a collective at any distance from each other.
#[test]
fn ranks_run_ahead_of_each_other() {
    for schedule in Schedule::all(20) {
        let _session = Session::new(schedule);
        launch(4, |rank| {
            let buffer = rank.upload(&[1.0f32; N]);
            for _ in 0..10 {
                let (at, op) = (at(&buffer), ncclRedOp_t::ncclSum);
                // SAFETY: in place, N values.
                check(unsafe { sys::ncclAllReduce(at, at, N, f32::TYPE, op, rank.comm, rank.cu_stream()) });
                if rank.rank == 2 {
                    rank.stream.synchronize().expect("all has run");
                }
            }
            assert_eq!(rank.download(&buffer), [4.0f32.powi(10); N]);
        });
    }
}
