//! Graphs: captured once, launched often, scheduled and checked as streams are.

use std::sync::Arc;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUresult, CUstreamCaptureMode, CUstreamCaptureStatus};
use cudarc::driver::{CudaContext, CudaGraph, CudaStream, DriverError};
use cudarc::nccl::{self, Comm, Id, ReduceOp};
use fake_cuda::{Kind, Schedule, Session};

const N: usize = 16;
const THREAD: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
const GLOBAL: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;

fn setup(device: usize) -> Result<(Arc<CudaContext>, Arc<CudaStream>), DriverError> {
    let context = CudaContext::new(device)?;
    // SAFETY: the tests order the streams themselves, or mean not to.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream()?;
    Ok((context, stream))
}

fn capture(
    stream: &Arc<CudaStream>,
    record: impl FnOnce() -> Result<(), DriverError>,
) -> Result<CudaGraph, DriverError> {
    stream.begin_capture(THREAD)?;
    record()?;
    Ok(stream.end_capture(CUgraphInstantiate_flags(0))?.expect("a graph"))
}

fn code<T>(result: Result<T, DriverError>) -> CUresult {
    result.err().map_or(CUresult::CUDA_SUCCESS, |error| error.0)
}

/// `target` becomes `source`, by way of a side stream; the wait of the side stream or of the main one may be missing.
fn relay(into_side: bool, back: bool) -> Result<Vec<Vec<u32>>, DriverError> {
    let (context, main) = setup(0)?;
    let side = context.new_stream()?;
    let mut source = main.clone_htod(&[1u32; N])?;
    let mut between = main.clone_htod(&[0u32; N])?;
    let mut middle = main.clone_htod(&[0u32; N])?;
    let mut target = main.clone_htod(&[0u32; N])?;
    context.synchronize()?;
    let graph = capture(&main, || {
        // Joins the capture, before the copy that it has to wait for.
        side.wait(&main.record_event(None)?)?;
        main.memcpy_dtod(&source, &mut between)?;
        if into_side {
            side.wait(&main.record_event(None)?)?;
        }
        side.memcpy_dtod(&between, &mut middle)?;
        let done = side.record_event(None)?;
        if back {
            main.wait(&done)?;
        }
        main.memcpy_dtod(&middle, &mut target)?;
        main.wait(&done)
    })?;
    let mut results = Vec::new();
    for value in 1..4 {
        main.memcpy_htod(&[value; N], &mut source)?;
        graph.launch()?;
        results.push(main.clone_dtoh(&target)?);
    }
    context.synchronize()?;
    Ok(results)
}

#[test]
fn every_launch_computes_anew_in_every_schedule() -> Result<(), DriverError> {
    for schedule in Schedule::all(50) {
        let _session = Session::new(schedule);
        assert_eq!(relay(true, true)?, [[1; N], [2; N], [3; N]], "{schedule:?}");
    }
    Ok(())
}

#[test]
fn a_wait_that_is_missing_in_a_graph_is_stale_and_found() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Latest);
    assert_eq!(relay(false, true)?, [[0; N], [1; N], [2; N]]);
    session.expect(Kind::Race, "graph 0, captured from stream 2 of device 0 reads bytes");
    assert_eq!(relay(true, false)?[0], [0; N]);
    session.expect(Kind::Race, "captured from stream");
    drop(session);
    for schedule in Schedule::all(10) {
        let session = Session::new(schedule);
        relay(false, true)?;
        session.expect(Kind::Race, "reads bytes");
    }
    Ok(())
}

#[test]
fn nothing_runs_while_it_is_captured() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Earliest);
    let (context, stream) = setup(0)?;
    let mut values = stream.clone_htod(&[7u32; N])?;
    let graph = capture(&stream, || {
        assert_eq!(stream.capture_status()?, CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE);
        stream.memset_zeros(&mut values)
    })?;
    assert_eq!(stream.capture_status()?, CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE);
    assert_eq!(stream.clone_dtoh(&values)?, [7; N]);
    graph.upload()?;
    graph.launch()?;
    assert_eq!(stream.clone_dtoh(&values)?, [0; N]);
    assert_eq!(session.pending(), 0);
    context.synchronize()
}

#[test]
fn what_the_host_waits_for_cannot_be_captured() -> Result<(), DriverError> {
    let _session = Session::new(Schedule::Latest);
    let (context, stream) = setup(0)?;
    let values = stream.clone_htod(&[7u32; N])?;
    let refused: [&dyn Fn() -> Result<(), DriverError>; 5] = [
        &|| stream.synchronize(),
        &|| context.synchronize(),
        &|| stream.clone_dtoh(&values).map(drop),
        &|| stream.clone_htod(&[1u32]).map(drop),
        &|| values.stream().record_event(None)?.synchronize(),
    ];
    for (index, call) in refused.into_iter().enumerate() {
        stream.begin_capture(THREAD)?;
        let expected = match index {
            4 => CUresult::CUDA_ERROR_CAPTURED_EVENT,
            _ => CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        };
        assert_eq!(code(call()), expected, "call {index}");
        // What cudarc could not free meanwhile is an error of its next call.
        let _ = context.check_err();
        let ended = stream.end_capture(CUgraphInstantiate_flags(0));
        assert_eq!(code(ended), CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    assert_eq!(stream.clone_dtoh(&values)?, [7; N]);
    context.synchronize()
}

#[test]
fn a_stream_that_does_not_come_back_is_refused() -> Result<(), DriverError> {
    let _session = Session::new(Schedule::Latest);
    let (context, stream) = setup(0)?;
    let side = context.new_stream()?;
    let mut values = stream.clone_htod(&[7u32; N])?;
    stream.begin_capture(THREAD)?;
    side.wait(&stream.record_event(None)?)?;
    side.memset_zeros(&mut values)?;
    assert_eq!(
        code(side.end_capture(CUgraphInstantiate_flags(0))),
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
    );
    assert_eq!(
        code(stream.end_capture(CUgraphInstantiate_flags(0))),
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED
    );
    side.synchronize()?;
    assert_eq!(stream.clone_dtoh(&values)?, [7; N]);
    context.synchronize()
}

#[test]
fn an_event_from_outside_and_the_legacy_stream_are_refused() -> Result<(), DriverError> {
    let _session = Session::new(Schedule::Latest);
    let (context, stream) = setup(0)?;
    let other = context.new_stream()?;
    let event = other.record_event(None)?;
    stream.begin_capture(THREAD)?;
    assert_eq!(code(stream.wait(&event)), CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    assert_eq!(
        code(stream.end_capture(CUgraphInstantiate_flags(0))),
        CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    );
    let legacy = context.default_stream();
    assert_eq!(code(legacy.begin_capture(THREAD)), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    context.synchronize()
}

/// What a watchdog must know: asking an event voids a capture that reaches all threads.
#[test]
fn how_far_a_capture_reaches() -> Result<(), DriverError> {
    let _session = Session::new(Schedule::Latest);
    let (context, stream) = setup(0)?;
    let event = context.new_stream()?.record_event(None)?;
    for (mode, allowed) in [(THREAD, true), (GLOBAL, false)] {
        stream.begin_capture(mode)?;
        let asked = std::thread::scope(|scope| {
            let ask = scope.spawn(|| event.try_is_complete());
            ask.join().expect("no panic")
        });
        assert_eq!(asked.is_ok(), allowed);
        assert_eq!(stream.end_capture(CUgraphInstantiate_flags(0)).is_ok(), allowed);
    }
    context.synchronize()
}

#[test]
fn memory_of_a_graph_is_fresh_in_each_launch() -> Result<(), DriverError> {
    for schedule in Schedule::all(10) {
        let _session = Session::new(schedule);
        let (context, stream) = setup(0)?;
        let source = stream.clone_htod(&[7u32; N])?;
        let mut target = stream.alloc_zeros::<u32>(N)?;
        let graph = capture(&stream, || {
            // SAFETY: written before it is read.
            let mut scratch = unsafe { stream.alloc::<u32>(N)? };
            stream.memcpy_dtod(&source, &mut scratch)?;
            stream.memcpy_dtod(&scratch, &mut target)
        })?;
        for _ in 0..3 {
            stream.memset_zeros(&mut target)?;
            graph.launch()?;
            assert_eq!(stream.clone_dtoh(&target)?, [7; N]);
        }
        context.synchronize()?;
    }
    Ok(())
}

#[test]
fn memory_from_before_cannot_be_freed_by_a_graph() -> Result<(), DriverError> {
    let _session = Session::new(Schedule::Latest);
    let (context, stream) = setup(0)?;
    let address = stream.alloc_zeros::<u32>(N)?.leak();
    stream.begin_capture(THREAD)?;
    // SAFETY: the call must be refused.
    let refused = unsafe { cudarc::driver::result::free_async(address, stream.cu_stream()) };
    assert_eq!(code(refused), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    assert!(stream.end_capture(CUgraphInstantiate_flags(0)).is_err());
    // SAFETY: the memory is ours.
    unsafe { cudarc::driver::result::free_async(address, stream.cu_stream())? };
    context.synchronize()
}

#[test]
fn collectives_are_captured() {
    fn rank(rank: usize, ranks: usize, id: Id) -> Result<(), DriverError> {
        let (context, stream) = setup(rank)?;
        let comm = Comm::from_rank(stream.clone(), rank, ranks, id).expect("a communicator");
        let mut sum = stream.clone_htod(&[1.0f32; N])?;
        let graph = capture(&stream, || {
            comm.all_reduce_in_place(&mut sum, &ReduceOp::Sum).expect("no error");
            Ok(())
        })?;
        for launch in 1..4 {
            graph.launch()?;
            assert_eq!(stream.clone_dtoh(&sum)?, [(ranks as f32).powi(launch); N]);
        }
        drop((graph, sum));
        context.synchronize()
    }
    for schedule in Schedule::all(20) {
        let _session = Session::new(schedule);
        let id = nccl::result::get_uniqueid().expect("an id");
        std::thread::scope(|scope| {
            let ranks =
                (0..3).map(|r| scope.spawn(move || rank(r, 3, Id::uninit(id.internal)))).collect::<Vec<_>>();
            ranks.into_iter().for_each(|rank| rank.join().expect("no panic").expect("no error"));
        });
    }
}

#[test]
fn a_graph_that_stays_is_a_leak() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Latest);
    let (context, stream) = setup(0)?;
    std::mem::forget(capture(&stream, || Ok(()))?);
    drop((stream, context));
    let panic =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(session))).expect_err("findings");
    let message = panic.downcast_ref::<String>().cloned().unwrap_or_default();
    assert!(message.contains("1 graphs, and 1 instances"), "{message}");
    Ok(())
}
