//! Calls that start together.

use cudarc::nccl::sys::{self, ncclRedOp_t};
use fake_cuda::{Kind, Schedule, Session};

use super::world::{Element, at, check, device, launch, values};

const N: usize = 16;

fn grouped(calls: impl FnOnce()) {
    // SAFETY: the calls are of this thread.
    check(unsafe { sys::ncclGroupStart() });
    calls();
    // SAFETY: as above.
    check(unsafe { sys::ncclGroupEnd() });
}

#[test]
fn a_group_of_collectives_is_one_launch() {
    for schedule in Schedule::all(20) {
        let session = Session::new(schedule);
        launch(3, |rank| {
            let buffers = [0, 1].map(|i| rank.upload(&values::<f32>(rank.rank + i, N)));
            let gathered = rank.upload(&[0.0f32; 3 * N]);
            grouped(|| {
                for buffer in &buffers {
                    let (at, op) = (at(buffer), ncclRedOp_t::ncclMax);
                    // SAFETY: in place, N values.
                    check(unsafe {
                        sys::ncclAllReduce(at, at, N, f32::TYPE, op, rank.comm, rank.cu_stream())
                    });
                }
                // SAFETY: N values of each rank.
                check(unsafe {
                    let (from, to) = (at(&buffers[0]), at(&gathered));
                    sys::ncclAllGather(from, to, N, f32::TYPE, rank.comm, rank.cu_stream())
                });
            });
            assert_eq!(rank.download(&buffers[0]), values::<f32>(2, N));
            assert_eq!(rank.download(&buffers[1]), values::<f32>(3, N));
        });
        // What one call of a group writes another may not read: they are not ordered.
        assert!(session.take_findings().iter().all(|finding| finding.kind == Kind::Race));
    }
}

#[test]
fn sends_and_receives_of_a_group_do_not_wait_for_each_other() {
    for schedule in Schedule::all(20) {
        let _session = Session::new(schedule);
        launch(4, |rank| {
            let send = rank.upload(&values::<f32>(rank.rank, N));
            let receive = rank.upload(&[0.0f32; N]);
            let (next, previous) = ((rank.rank + 1) % 4, (rank.rank + 3) % 4);
            let stream = rank.cu_stream();
            grouped(|| {
                // SAFETY: N values each.
                check(unsafe { sys::ncclSend(at(&send), N, f32::TYPE, next as i32, rank.comm, stream) });
                // SAFETY: as above.
                check(unsafe {
                    sys::ncclRecv(at(&receive), N, f32::TYPE, previous as i32, rank.comm, stream)
                });
            });
            assert_eq!(rank.download(&receive), values::<f32>(previous, N));
        });
    }
}

#[test]
fn one_thread_drives_all_ranks_in_groups() {
    for schedule in Schedule::all(10) {
        let _session = Session::new(schedule);
        let devices = [0, 1, 2].map(device);
        let mut comms = [std::ptr::null_mut(); 3];
        // SAFETY: there is room for three communicators; the devices are the first three.
        check(unsafe { sys::ncclCommInitAll(comms.as_mut_ptr(), 3, std::ptr::null()) });
        let buffers = devices.iter().map(|(_, stream)| stream.clone_htod(&[1.5f32; N]).expect("room"));
        let buffers = buffers.collect::<Vec<_>>();
        grouped(|| {
            for ((comm, buffer), (context, stream)) in comms.iter().zip(&buffers).zip(&devices) {
                context.bind_to_thread().expect("a context");
                let (at, op, stream) = (at(buffer), ncclRedOp_t::ncclSum, stream.cu_stream().cast());
                // SAFETY: in place, N values.
                check(unsafe { sys::ncclAllReduce(at, at, N, f32::TYPE, op, *comm, stream) });
            }
        });
        for (buffer, (_, stream)) in buffers.iter().zip(&devices) {
            assert_eq!(stream.clone_dtoh(buffer).expect("a copy"), [4.5; N]);
        }
        for comm in comms {
            // SAFETY: the communicator is ours.
            check(unsafe { sys::ncclCommDestroy(comm) });
        }
    }
}

#[test]
fn a_group_end_without_a_start_is_found() {
    let session = Session::new(Schedule::Latest);
    // SAFETY: the call takes nothing.
    assert_ne!(unsafe { sys::ncclGroupEnd() }, sys::ncclResult_t::ncclSuccess);
    session.expect(Kind::Misuse, "ncclGroupEnd without ncclGroupStart");
}
