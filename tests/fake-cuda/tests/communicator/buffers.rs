//! Memory that is registered, and collectives in graphs.

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use fake_cuda::{Schedule, Session};
use fsdp_runtime::comm::nccl::NcclMemory;
use fsdp_runtime::comm::{Accumulate, Communicator, Gather, Reduce, Registration};
use fsdp_runtime::device::{Slice, Stream};
use fsdp_runtime::spec::Dtype;
use fsdp_test_fake_cuda::schedules;

use super::world::{run, tag, values};

#[test]
fn memory_that_is_registered_outlives_the_communicator() {
    for schedule in schedules(3) {
        for how in [Registration::Buffer, Registration::Window] {
            let _session = Session::new(schedule);
            run(2, |rank| {
                let comm = rank.join()?;
                let memory = NcclMemory::new(&rank.device);
                // SAFETY: the gathers use it, and `download` when their stream has passed them.
                let recv = unsafe { Slice::zeros_in(&memory, Dtype::F32, 64, None) }?;
                // SAFETY: it has no element.
                let nothing = unsafe { Slice::zeros_in(&memory, Dtype::F32, 0, None) }?;
                comm.register(&[recv.clone(), recv.clone(), nothing], how)?;
                for step in 0..3 {
                    let send = rank.upload(Dtype::F32, &values(rank.rank() + step, 32))?;
                    rank.hand_over()?;
                    comm.all_gather(&*rank.side, tag("a"), vec![Gather { send, recv: recv.clone() }])?;
                    assert_eq!(rank.download(&recv)?, [values(step, 32), values(step + 1, 32)].concat());
                }
                Ok(())
            });
        }
    }
}

#[test]
fn memory_of_a_pool_is_not_registered() {
    let _session = Session::new(Schedule::Latest);
    run(2, |rank| {
        let comm = rank.join()?;
        // SAFETY: nothing uses it.
        let of_the_host = unsafe { Slice::zeros(Dtype::F32, 4, None) };
        for slice in [rank.zeros(Dtype::F32, 4)?, of_the_host] {
            let error = comm.register(&[slice], Registration::Buffer).expect_err("it may move").to_string();
            assert!(
                error.contains("slice 0 cannot be registered: its memory is not of a fixed place"),
                "{error}"
            );
        }
        Ok(())
    });
}

/// A graph of an all-gather and a reduce-scatter through scratch memory, which was made before.
#[test]
fn a_graph_repeats_collectives() {
    for schedule in schedules(5) {
        let _session = Session::new(schedule);
        let results = run(2, |rank| {
            let comm = rank.join()?;
            let send = rank.upload(Dtype::F32, &values(rank.rank(), 8))?;
            let (whole, sum) = (rank.zeros(Dtype::F32, 16)?, rank.zeros(Dtype::F32, 8)?);
            rank.hand_over()?;
            let step = || {
                let gather = Gather { send: send.clone(), recv: whole.clone() };
                comm.all_gather(&*rank.side, tag("a"), vec![gather])?;
                let (scale, accumulate) = (0.5, Accumulate::Add);
                let reduce = Reduce { send: whole.clone(), recv: sum.clone(), scale, accumulate };
                comm.reduce_scatter(&*rank.side, tag("a"), vec![reduce])
            };
            step()?;
            rank.side.record().synchronize()?;
            let stream = rank.side.cuda_stream();
            stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
            step()?;
            let graph = stream.end_capture(CUgraphInstantiate_flags(0))?.ok_or("a graph")?;
            for _ in 0..3 {
                graph.launch()?;
            }
            rank.download(&sum)
        });
        for (rank, sum) in results.iter().enumerate() {
            // Each of two ranks brings the same whole, halved; done once and three times more.
            let expected: Vec<f32> = values(rank, 8).iter().map(|x| 4.0 * x).collect();
            assert_eq!(*sum, expected);
        }
    }
}
