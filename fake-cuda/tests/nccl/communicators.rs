//! How communicators come and go: splits, calls that do not block, registered memory.

use cudarc::nccl::sys::{self, ncclComm_t, ncclRedOp_t, ncclResult_t};
use fake_cuda::{Kind, Schedule, Session};

use super::world::{Element, Rank, async_error, at, check, config, device, launch, on_threads, unique_id};

fn sum_of_ranks(rank: &Rank, comm: ncclComm_t) -> f32 {
    let buffer = rank.upload(&[rank.rank as f32]);
    let (at, op) = (at(&buffer), ncclRedOp_t::ncclSum);
    // SAFETY: in place, one value.
    check(unsafe { sys::ncclAllReduce(at, at, 1, f32::TYPE, op, comm, rank.cu_stream()) });
    rank.download(&buffer)[0]
}

fn split(rank: &Rank, color: i32, key: i32) -> ncclComm_t {
    let mut new = std::ptr::null_mut();
    // SAFETY: the call writes the communicator; all ranks make it.
    check(unsafe { sys::ncclCommSplit(rank.comm, color, key, &mut new, std::ptr::null_mut()) });
    new
}

fn destroy(comm: ncclComm_t) {
    // SAFETY: the caller owns the communicator.
    check(unsafe { sys::ncclCommDestroy(comm) });
}

/// The rows and columns of a mesh of 2 x 3.
#[test]
fn splits_are_the_dims_of_a_mesh() {
    for schedule in Schedule::all(10) {
        let _session = Session::new(schedule);
        launch(6, |rank| {
            let (row, column) = (rank.rank / 3, rank.rank % 3);
            let (along_row, along_column) = (split(rank, row as i32, 0), split(rank, column as i32, 0));
            assert_eq!(sum_of_ranks(rank, along_row), [3.0, 12.0][row]);
            assert_eq!(sum_of_ranks(rank, along_column), (2 * column + 3) as f32);
            assert_eq!(sum_of_ranks(rank, rank.comm), 15.0);
            destroy(along_row);
            destroy(along_column);
        });
    }
}

#[test]
fn keys_order_the_ranks_of_a_split_and_no_color_leaves_one_out() {
    let _session = Session::new(Schedule::Latest);
    launch(4, |rank| {
        let outside = rank.rank == 1;
        let comm = split(rank, if outside { -1 } else { 7 }, -(rank.rank as i32));
        assert_eq!(comm.is_null(), outside);
        if !outside {
            let (mut number, mut count) = (0, 0);
            // SAFETY: the calls write an integer each.
            check(unsafe { sys::ncclCommUserRank(comm, &mut number) });
            // SAFETY: as above.
            check(unsafe { sys::ncclCommCount(comm, &mut count) });
            assert_eq!((number, count), ([2, 9, 1, 0][rank.rank], 3));
            destroy(comm);
        }
    });
}

fn settled(comm: ncclComm_t) -> ncclResult_t {
    loop {
        match async_error(comm) {
            ncclResult_t::ncclInProgress => std::thread::yield_now(),
            code => return code,
        }
    }
}

/// A communicator that does not block returns `ncclInProgress` from everything, until it is asked.
#[test]
fn calls_that_do_not_block_are_polled() {
    for schedule in Schedule::all(10) {
        let _session = Session::new(schedule);
        let id = unique_id();
        on_threads(3, |rank| {
            let (context, stream) = device(rank);
            let (mut comm, mut config) = (std::ptr::null_mut(), config(false));
            // SAFETY: the call writes the communicator.
            let code = unsafe { sys::ncclCommInitRankConfig(&mut comm, 3, id, rank as i32, &mut config) };
            assert!(matches!(code, ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress));
            check(settled(comm));
            let buffer = stream.clone_htod(&[rank as f32]).expect("room");
            let (at, op, cu_stream) = (at(&buffer), ncclRedOp_t::ncclSum, stream.cu_stream().cast());
            // SAFETY: in place, one value.
            let code = unsafe { sys::ncclAllReduce(at, at, 1, f32::TYPE, op, comm, cu_stream) };
            assert!(matches!(code, ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress));
            check(settled(comm));
            assert_eq!(stream.clone_dtoh(&buffer).expect("a copy"), [3.0]);
            // SAFETY: the communicator is this rank's.
            let code = unsafe { sys::ncclCommFinalize(comm) };
            assert!(matches!(code, ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress));
            check(settled(comm));
            destroy(comm);
            drop(buffer);
            context.synchronize().expect("all has run");
        });
    }
}

/// An event that is recorded before a call has left `ncclInProgress` is recorded before the call.
#[test]
fn an_event_after_an_unsettled_call_does_not_wait_for_it() {
    let session = Session::new(Schedule::Latest);
    let id = unique_id();
    let values = on_threads(2, |rank| {
        let (context, stream) = device(rank);
        let other = context.new_stream().expect("a stream");
        let (mut comm, mut config) = (std::ptr::null_mut(), config(false));
        // SAFETY: the call writes the communicator.
        unsafe { sys::ncclCommInitRankConfig(&mut comm, 2, id, rank as i32, &mut config) };
        check(settled(comm));
        let buffer = stream.clone_htod(&[1.0f32]).expect("room");
        let (at, op) = (at(&buffer), ncclRedOp_t::ncclSum);
        // SAFETY: in place, one value.
        let code = unsafe { sys::ncclAllReduce(at, at, 1, f32::TYPE, op, comm, stream.cu_stream().cast()) };
        assert_eq!(code, ncclResult_t::ncclInProgress);
        other.wait(&stream.record_event(None).expect("an event")).expect("a wait");
        let value = other.clone_dtoh(&buffer).expect("a copy")[0];
        check(settled(comm));
        context.synchronize().expect("all has run");
        destroy(comm);
        value
    });
    assert_eq!(values, [1.0, 1.0]);
    session.take_findings();
}

#[test]
fn a_call_before_the_last_one_has_settled_is_found() {
    let session = Session::new(Schedule::Latest);
    let id = unique_id();
    let (context, stream) = device(0);
    let (mut comm, mut config) = (std::ptr::null_mut(), config(false));
    // SAFETY: the call writes the communicator.
    unsafe { sys::ncclCommInitRankConfig(&mut comm, 1, id, 0, &mut config) };
    check(settled(comm));
    let buffer = stream.clone_htod(&[1.0f32]).expect("room");
    let (at, op) = (at(&buffer), ncclRedOp_t::ncclSum);
    let call = || {
        // SAFETY: in place, one value.
        unsafe { sys::ncclAllReduce(at, at, 1, f32::TYPE, op, comm, stream.cu_stream().cast()) }
    };
    assert_eq!(call(), ncclResult_t::ncclInProgress);
    assert_eq!(call(), ncclResult_t::ncclInvalidUsage);
    session.expect(Kind::Misuse, "before its last call is out of progress");
    check(settled(comm));
    drop(buffer);
    context.synchronize().expect("all has run");
    destroy(comm);
}

#[test]
fn registered_memory_must_come_from_nccl_and_outlive_its_registration() {
    let session = Session::new(Schedule::Latest);
    launch(2, |rank| {
        let (mut buffer, mut window, mut handle) =
            (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the calls write the addresses and handles; the memory is freed once they are gone.
        unsafe {
            check(sys::ncclMemAlloc(&mut buffer, 1 << 12));
            check(sys::ncclCommWindowRegister(rank.comm, buffer, 1 << 12, &mut window, 1));
            check(sys::ncclCommRegister(rank.comm, buffer, 1 << 12, &mut handle));
            check(sys::ncclCommDeregister(rank.comm, handle));
            check(sys::ncclCommWindowDeregister(rank.comm, window));
            check(sys::ncclMemFree(buffer));
        }
    });
    assert_eq!(session.findings(), []);
    launch(1, |rank| {
        let buffer = rank.upload(&[0.0f32; 1 << 10]);
        let mut window = std::ptr::null_mut();
        // SAFETY: the call must be refused.
        let code = unsafe { sys::ncclCommWindowRegister(rank.comm, at(&buffer), 1 << 12, &mut window, 1) };
        assert_eq!(code, ncclResult_t::ncclInvalidArgument);
        session.expect(Kind::Misuse, "not from the right allocator");
        let (mut own, mut handle) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the calls write the address and the handle.
        unsafe {
            check(sys::ncclMemAlloc(&mut own, 1 << 12));
            check(sys::ncclCommRegister(rank.comm, own, 1 << 12, &mut handle));
            check(sys::ncclMemFree(own));
        }
        session.expect(Kind::Misuse, "still registered with communicator");
        // SAFETY: the registration is the communicator's.
        check(unsafe { sys::ncclCommDeregister(rank.comm, handle) });
    });
}

/// Where calls do not block the room for a handle has to outlive the call.
#[test]
fn a_window_has_its_handle_once_the_call_has_settled() {
    let _session = Session::new(Schedule::Latest);
    let id = unique_id();
    let (_context, _stream) = device(0);
    let (mut comm, mut config) = (std::ptr::null_mut(), config(false));
    let (mut buffer, mut window) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the calls write the communicator and the address.
    unsafe {
        sys::ncclCommInitRankConfig(&mut comm, 1, id, 0, &mut config);
        check(settled(comm));
        check(sys::ncclMemAlloc(&mut buffer, 1 << 12));
    }
    // SAFETY: the room for the handle stays until the call has settled.
    let code = unsafe { sys::ncclCommWindowRegister(comm, buffer, 1 << 12, &raw mut window, 1) };
    assert_eq!((code, window.is_null()), (ncclResult_t::ncclInProgress, true));
    check(settled(comm));
    assert!(!window.is_null());
    // SAFETY: the window is the communicator's, and the memory is freed once it is gone.
    unsafe {
        check(sys::ncclCommWindowDeregister(comm, window));
        check(sys::ncclMemFree(buffer));
    }
    destroy(comm);
}

#[test]
fn a_communicator_that_stays_is_a_leak() {
    let session = Session::new(Schedule::Latest);
    let id = unique_id();
    let (context, _stream) = device(0);
    let mut comm = std::ptr::null_mut();
    // SAFETY: the call writes the communicator.
    check(unsafe { sys::ncclCommInitRank(&mut comm, 1, id, 0) });
    drop((_stream, context));
    session.expect(Kind::Leak, "communicator 0 (rank 0) outlives the context of device 0");
}
