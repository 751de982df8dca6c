//! Ranks that disagree, are lost or wait for each other.

use std::sync::Barrier;
use std::time::Duration;

use cudarc::nccl::sys::{self, ncclRedOp_t, ncclResult_t};
use fake_cuda::{Kind, Schedule, Session};

use super::world::{Element, Rank, at, check, config, device, launch, on_threads, unique_id};

fn all_reduce<T: Element>(rank: &Rank, count: usize, op: ncclRedOp_t) -> cudarc::driver::CudaSlice<T> {
    let buffer = rank.upload(&vec![T::of(1.0); count]);
    let at = at(&buffer);
    // SAFETY: in place, `count` values.
    check(unsafe { sys::ncclAllReduce(at, at, count, T::TYPE, op, rank.comm, rank.cu_stream()) });
    buffer
}

#[test]
fn ranks_that_call_different_collectives_are_found() {
    for schedule in Schedule::all(5) {
        let session = Session::new(schedule);
        launch(2, |rank| {
            if rank.rank == 0 {
                all_reduce::<f32>(rank, 4, ncclRedOp_t::ncclSum);
            } else {
                let buffer = rank.upload(&[0.0f32; 4]);
                // SAFETY: in place, four values.
                check(unsafe {
                    sys::ncclBroadcast(at(&buffer), at(&buffer), 4, f32::TYPE, 0, rank.comm, rank.cu_stream())
                });
            }
            rank.stream.synchronize().expect("all has run");
            assert_ne!(rank.async_error(), ncclResult_t::ncclSuccess);
        });
        session.expect(
            Kind::Mismatch,
            "rank 0 calls ncclAllReduce of 4 F32, sum, rank 1 calls ncclBroadcast from rank 0 of 4 F32",
        );
    }
}

#[test]
fn ranks_that_differ_in_count_dtype_or_reduction_are_found() {
    type Difference = (&'static str, fn(&Rank));
    let differ: [Difference; 3] = [
        ("of 4 F32, sum, rank 1 calls ncclAllReduce of 5 F32, sum", |rank| {
            all_reduce::<f32>(rank, 4 + rank.rank, ncclRedOp_t::ncclSum);
        }),
        ("of 4 F32, sum, rank 1 calls ncclAllReduce of 4 I32, sum", |rank| match rank.rank {
            0 => drop(all_reduce::<f32>(rank, 4, ncclRedOp_t::ncclSum)),
            _ => drop(all_reduce::<i32>(rank, 4, ncclRedOp_t::ncclSum)),
        }),
        ("of 4 F32, sum, rank 1 calls ncclAllReduce of 4 F32, average", |rank| {
            all_reduce::<f32>(rank, 4, [ncclRedOp_t::ncclSum, ncclRedOp_t::ncclAvg][rank.rank]);
        }),
    ];
    for (message, body) in differ {
        let session = Session::new(Schedule::Latest);
        launch(2, body);
        session.expect(Kind::Mismatch, message);
    }
}

/// What a watchdog does: it polls, and aborts when a rank's part does not come.
#[test]
fn survivors_of_a_lost_rank_abort_and_go_on() {
    for schedule in Schedule::all(10) {
        for reported in [true, false] {
            let session = Session::new(schedule);
            session.lose_device(1, 2, reported);
            launch(3, |rank| {
                let first = all_reduce::<f32>(rank, 4, ncclRedOp_t::ncclSum);
                let second = all_reduce::<f32>(rank, 4, ncclRedOp_t::ncclSum);
                assert_eq!((rank.download(&first), rank.download(&second)), (vec![3.0; 4], vec![3.0; 4]));
                let third = all_reduce::<f32>(rank, 4, ncclRedOp_t::ncclSum);
                let event = rank.stream.record_event(None).expect("an event");
                for _ in 0..100 {
                    assert!(!event.try_is_complete().expect("no error"), "the third never completes");
                }
                while reported && rank.async_error() != ncclResult_t::ncclRemoteError {
                    std::thread::yield_now();
                }
                rank.abort();
                rank.stream.synchronize().expect("aborting lets the stream go on");
                drop(third);
            });
            // The harness destroys what was aborted, which NCCL does not allow.
            session.expect(Kind::Misuse, "is used after it was destroyed");
        }
    }
}

#[test]
fn waiting_for_a_lost_rank_ends_with_an_error_once_patience_does() {
    let session = Session::new(Schedule::Latest);
    session.lose_device(0, 0, false);
    let both = Barrier::new(2);
    launch(2, |rank| {
        let buffer = all_reduce::<f32>(rank, 4, ncclRedOp_t::ncclSum);
        both.wait();
        session.set_patience(Duration::from_millis(50));
        assert!(rank.stream.synchronize().is_err());
        rank.abort();
        drop(buffer);
        rank.stream.synchronize().expect("aborting lets the stream go on");
    });
    let findings = session.take_findings();
    let named =
        |f: &fake_cuda::Finding| f.kind == Kind::Deadlock && f.message.contains("lacks the call of rank 0");
    assert!(findings.iter().any(named), "{findings:?}");
}

/// Two communicators on two streams, which the ranks use in opposite orders.
#[test]
fn a_circle_of_collectives_is_a_deadlock() {
    for schedule in Schedule::all(5) {
        let session = Session::new(schedule);
        let both = Barrier::new(2);
        launch(2, |rank| {
            let mut second = std::ptr::null_mut();
            // SAFETY: the call writes the communicator; both ranks make it.
            check(unsafe {
                sys::ncclCommSplit(rank.comm, 0, rank.rank as i32, &mut second, std::ptr::null_mut())
            });
            let order = if rank.rank == 0 { [rank.comm, second] } else { [second, rank.comm] };
            let buffer = rank.upload(&[1.0f32]);
            for comm in order {
                let (at, op) = (at(&buffer), ncclRedOp_t::ncclSum);
                // SAFETY: in place, one value.
                check(unsafe { sys::ncclAllReduce(at, at, 1, f32::TYPE, op, comm, rank.cu_stream()) });
            }
            both.wait();
            session.set_patience(Duration::from_millis(50));
            assert!(rank.stream.synchronize().is_err());
            // SAFETY: the communicator is this rank's.
            check(unsafe { sys::ncclCommAbort(second) });
            rank.abort();
            rank.stream.synchronize().expect("aborting lets the stream go on");
        });
        let findings = session.take_findings();
        assert!(findings.iter().any(|f| f.kind == Kind::Deadlock && f.message.contains("which waits for")));
    }
}

#[test]
fn a_communicator_that_lacks_a_rank_can_be_given_up() {
    let session = Session::new(Schedule::Latest);
    session.set_patience(Duration::from_millis(50));
    let id = unique_id();
    on_threads(2, |rank| {
        let (_context, _stream) = device(rank);
        let (mut comm, mut config) = (std::ptr::null_mut(), config(rank == 0));
        // SAFETY: the call writes the communicator.
        let code = unsafe { sys::ncclCommInitRankConfig(&mut comm, 3, id, rank as i32, &mut config) };
        let expected = [ncclResult_t::ncclSystemError, ncclResult_t::ncclInProgress][rank];
        assert_eq!(code, expected);
        // SAFETY: the communicator is this rank's.
        check(unsafe { sys::ncclCommAbort(comm) });
    });
    session.expect(Kind::Deadlock, "lacks ranks that have not joined");
}

#[test]
fn overlapping_and_foreign_buffers_are_refused() {
    let session = Session::new(Schedule::Latest);
    launch(1, |rank| {
        let buffer = rank.upload(&[1.0f32; 8]);
        let shifted = at(&buffer).wrapping_byte_add(4);
        let op = ncclRedOp_t::ncclSum;
        // SAFETY: the call must be refused.
        let code = unsafe {
            sys::ncclAllReduce(at(&buffer), shifted, 4, f32::TYPE, op, rank.comm, rank.cu_stream())
        };
        assert_eq!(code, ncclResult_t::ncclInvalidArgument);
        session.expect(Kind::Misuse, "buffers that overlap");
        let (_context, elsewhere) = device(1);
        let foreign = elsewhere.clone_htod(&[1.0f32; 8]).expect("room");
        let at = at(&foreign);
        // SAFETY: the call must be refused.
        let code = unsafe { sys::ncclAllReduce(at, at, 4, f32::TYPE, op, rank.comm, rank.cu_stream()) };
        assert_eq!(code, ncclResult_t::ncclInvalidArgument);
        session.expect(Kind::Misuse, "on device 0 with 32 bytes of memory of device 1");
        rank.context.bind_to_thread().expect("a context");
    });
}
