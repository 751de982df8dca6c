//! Order between streams: what a forgotten wait does, and that nothing else changes what a program computes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::{CudaContext, CudaStream, DriverError, sys};
use fake_cuda::{Kind, Schedule, Session};

const N: usize = 16;

/// A context in which only explicit waits order streams.
fn context(device: usize) -> Result<Arc<CudaContext>, DriverError> {
    let context = CudaContext::new(device)?;
    // SAFETY: the tests order the streams themselves, or mean not to.
    unsafe { context.disable_event_tracking() };
    Ok(context)
}

/// A value moves from one stream through a second one to a third one, which waits for what `waits` says.
fn relay(waits: [bool; 2]) -> Result<Vec<f32>, DriverError> {
    let context = context(0)?;
    let streams = [context.new_stream()?, context.new_stream_with_priority(-5)?, context.new_stream()?];
    let mut buffers =
        streams.iter().map(|stream| stream.clone_htod(&[0.0; N])).collect::<Result<Vec<_>, _>>()?;
    context.synchronize()?;
    streams[0].memcpy_htod(&[1.0; N], &mut buffers[0])?;
    for next in 1..3 {
        if waits[next - 1] {
            streams[next].wait(&streams[next - 1].record_event(None)?)?;
        }
        let (from, to) = buffers.split_at_mut(next);
        streams[next].memcpy_dtod(&from[next - 1], &mut to[0])?;
    }
    let last = streams[2].clone_dtoh(&buffers[2])?;
    context.synchronize()?;
    Ok(last)
}

#[test]
fn with_all_waits_every_schedule_gives_the_same() -> Result<(), DriverError> {
    for schedule in Schedule::all(200) {
        let session = Session::new(schedule);
        assert_eq!(relay([true, true])?, [1.0; N], "{schedule:?}");
        assert_eq!(session.findings(), [], "{schedule:?}");
    }
    Ok(())
}

#[test]
fn a_forgotten_wait_gives_stale_values_when_all_is_late() -> Result<(), DriverError> {
    for waits in [[false, true], [true, false]] {
        let session = Session::new(Schedule::Latest);
        assert_eq!(relay(waits)?, [0.0; N], "{waits:?}");
        session.expect(Kind::Race, "no wait orders the two");
    }
    Ok(())
}

#[test]
fn a_forgotten_wait_is_found_in_every_schedule() -> Result<(), DriverError> {
    for schedule in Schedule::all(20) {
        let session = Session::new(schedule);
        relay([true, false])?;
        session.expect(Kind::Race, "reads bytes that cuMemcpyDtoDAsync");
    }
    Ok(())
}

#[test]
fn random_schedules_run_racing_operations_both_ways() -> Result<(), DriverError> {
    let mut first = Vec::new();
    for seed in 0..40 {
        let session = Session::new(Schedule::Random(seed));
        first.push(relay([false, true])?[0]);
        session.take_findings();
    }
    assert!(first.contains(&0.0) && first.contains(&1.0));
    Ok(())
}

#[test]
fn an_event_waits_for_what_was_submitted_before_its_record_and_not_after() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Latest);
    let context = context(0)?;
    let (writer, reader) = (context.new_stream()?, context.new_stream()?);
    let mut source = writer.clone_htod(&[0u32])?;
    let mut copy = reader.alloc_zeros::<u32>(1)?;
    writer.memcpy_htod(&[1u32], &mut source)?;
    let event = writer.record_event(None)?;
    writer.memcpy_htod(&[2u32], &mut source)?;
    reader.wait(&event)?;
    reader.memcpy_dtod(&source, &mut copy)?;
    assert_eq!(reader.clone_dtoh(&copy)?, [1]);
    session.expect(Kind::Race, "cuMemcpyHtoDAsync");
    context.synchronize()
}

#[test]
fn a_wait_before_the_record_waits_for_nothing() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Latest);
    let context = context(0)?;
    let (writer, reader) = (context.new_stream()?, context.new_stream()?);
    let mut source = writer.clone_htod(&[7u32])?;
    let mut copy = reader.alloc_zeros::<u32>(1)?;
    context.synchronize()?;
    writer.memcpy_htod(&[8u32], &mut source)?;
    let event = context.new_event(None)?;
    reader.wait(&event)?;
    event.record(&writer)?;
    reader.memcpy_dtod(&source, &mut copy)?;
    assert_eq!(reader.clone_dtoh(&copy)?, [7]);
    session.expect(Kind::Race, "reads bytes");
    context.synchronize()
}

/// cudarc keeps one read event for a slice: the writer waits for the reader that came last, and for no other.
#[test]
fn the_tracking_of_cudarc_forgets_the_first_of_two_readers() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Latest);
    let context = CudaContext::new(0)?;
    let (writer, first, second) = (context.new_stream()?, context.new_stream()?, context.new_stream()?);
    let mut source = writer.clone_htod(&[1u32; N])?;
    let (mut one, mut two) = (first.alloc_zeros::<u32>(N)?, second.alloc_zeros::<u32>(N)?);
    context.synchronize()?;
    first.memcpy_dtod(&source, &mut one)?;
    second.memcpy_dtod(&source, &mut two)?;
    writer.memcpy_htod(&[2u32; N], &mut source)?;
    writer.synchronize()?;
    assert_eq!(second.clone_dtoh(&two)?, [1; N]);
    assert_eq!(first.clone_dtoh(&one)?, [2; N]);
    session.expect(Kind::Race, "writes bytes that cuMemcpyDtoDAsync");
    context.synchronize()
}

#[test]
fn work_runs_no_earlier_than_it_is_waited_for() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Latest);
    let context = context(0)?;
    let (busy, idle) = (context.new_stream()?, context.new_stream()?);
    let mut values = busy.alloc_zeros::<u8>(N)?;
    idle.synchronize()?;
    assert_eq!(session.pending(), 2);
    busy.memset_zeros(&mut values)?;
    let event = busy.record_event(None)?;
    assert!(!event.is_complete());
    busy.memset_zeros(&mut values)?;
    event.synchronize()?;
    assert_eq!(session.pending(), 1);
    assert!(event.is_complete());
    context.synchronize()?;
    assert_eq!(session.pending(), 0);
    Ok(())
}

#[test]
fn polling_comes_to_an_end() -> Result<(), DriverError> {
    for schedule in Schedule::all(5) {
        let _session = Session::new(schedule);
        let context = context(0)?;
        let stream = context.new_stream()?;
        let mut values = stream.alloc_zeros::<u8>(N)?;
        stream.memset_zeros(&mut values)?;
        let event = stream.record_event(None)?;
        while !event.try_is_complete()? {}
        context.synchronize()?;
    }
    Ok(())
}

#[test]
fn timed_events_are_ordered_and_untimed_ones_have_no_time() -> Result<(), DriverError> {
    let _session = Session::new(Schedule::Latest);
    let context = context(0)?;
    let stream = context.new_stream()?;
    let timed = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
    let start = stream.record_event(timed)?;
    let values = stream.alloc_zeros::<u8>(N)?;
    let end = stream.record_event(timed)?;
    assert!(start.elapsed_ms(&end)? > 0.0);
    let untimed = stream.record_event(None)?;
    assert!(start.elapsed_ms(&untimed).is_err());
    drop(values);
    context.synchronize()
}

/// The host does not see what arrives in pinned memory before it has waited.
#[test]
fn pinned_memory_is_written_in_stream_order() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Latest);
    let context = context(0)?;
    let stream = context.new_stream()?;
    let source = stream.clone_htod(&[5u32; N])?;
    // SAFETY: every value is written before it is read.
    let mut pinned = unsafe { context.alloc_pinned::<u32>(N)? };
    pinned.as_mut_slice()?.fill(4);
    stream.memcpy_dtoh(&source, &mut pinned)?;
    let early = pinned.as_ptr()?;
    // SAFETY: the memory is there and written; that the copy has not run is what is tested.
    let early = unsafe { std::slice::from_raw_parts(early, N) };
    assert_eq!(early, [4; N]);
    fake_cuda::read_pinned(early);
    session.expect(Kind::Race, "the host reads 64 bytes without waiting for cuMemcpyDtoHAsync");
    stream.synchronize()?;
    assert_eq!(pinned.as_slice()?, [5; N]);
    fake_cuda::read_pinned(pinned.as_slice()?);
    context.synchronize()
}

#[test]
fn copies_from_pageable_memory_take_the_values_at_once_and_from_pinned_memory_late() -> Result<(), DriverError>
{
    let _session = Session::new(Schedule::Latest);
    let context = context(0)?;
    let stream = context.new_stream()?;
    let mut pageable = vec![1u32; N];
    let copy = stream.clone_htod(&pageable)?;
    pageable.fill(2);
    assert_eq!(stream.clone_dtoh(&copy)?, [1; N]);
    // SAFETY: every value is written before it is read.
    let mut pinned = unsafe { context.alloc_pinned::<u32>(N)? };
    pinned.as_mut_slice()?.fill(1);
    let target = stream.clone_htod(&pinned)?;
    // SAFETY: the memory is there; that it is written too early is what is tested.
    let written_early = unsafe { std::slice::from_raw_parts_mut(pinned.as_ptr()?.cast_mut(), N) };
    written_early.fill(2);
    assert_eq!(stream.clone_dtoh(&target)?, [2; N]);
    context.synchronize()
}

#[test]
fn host_functions_run_in_stream_order_and_may_be_waited_for_by_other_means() -> Result<(), DriverError> {
    static RAN: AtomicBool = AtomicBool::new(false);
    extern "C" fn note(_: *mut std::ffi::c_void) {
        RAN.store(true, Ordering::Release);
    }
    fn launch(stream: &CudaStream) -> Result<(), DriverError> {
        // SAFETY: the function takes no data.
        unsafe {
            cudarc::driver::result::stream::launch_host_function(
                stream.cu_stream(),
                note,
                std::ptr::null_mut(),
            )
        }
    }
    let _session = Session::new(Schedule::Latest);
    let context = context(0)?;
    let stream = context.new_stream()?;
    launch(&stream)?;
    assert!(!RAN.swap(false, Ordering::AcqRel));
    stream.synchronize()?;
    assert!(RAN.swap(false, Ordering::AcqRel));
    launch(&stream)?;
    while !RAN.load(Ordering::Acquire) {
        std::thread::yield_now();
    }
    Ok(())
}

/// The streams that a context has by itself and those made without `NON_BLOCKING` wait for each other.
#[test]
fn the_legacy_stream_waits_for_blocking_streams() -> Result<(), DriverError> {
    let _session = Session::new(Schedule::Latest);
    let context = context(0)?;
    let (legacy, own) = (context.default_stream(), context.per_thread_stream());
    let mut source = legacy.clone_htod(&[0u32; N])?;
    own.memcpy_htod(&[3u32; N], &mut source)?;
    assert_eq!(legacy.clone_dtoh(&source)?, [3; N]);
    context.synchronize()
}

#[test]
fn streams_and_events_of_another_context_are_refused() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Latest);
    let (here, there) = (context(0)?, context(1)?);
    let stream = here.new_stream()?;
    let event = there.new_event(None)?;
    assert!(event.record(&stream).is_err());
    session.take_findings();
    Ok(())
}

#[test]
fn labels_and_names_are_in_findings() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Latest);
    let context = context(0)?;
    let (writer, reader) = (context.new_stream()?, context.new_stream()?);
    session.name_stream(writer.cu_stream(), "all-gather");
    let mut source = writer.alloc_zeros::<u32>(N)?;
    context.synchronize()?;
    fake_cuda::label("unit 3");
    writer.memset_zeros(&mut source)?;
    fake_cuda::label("");
    reader.clone_dtoh(&source)?;
    session.expect(Kind::Race, "(unit 3) on stream \"all-gather\" of device 0");
    context.synchronize()
}

#[test]
fn what_may_overlap_is_what_no_wait_orders() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Earliest);
    let context = context(0)?;
    let (main, side) = (context.new_stream()?, context.new_stream()?);
    session.name_stream(side.cu_stream(), "side");
    let mut buffers = [main.alloc_zeros::<u32>(N)?, side.alloc_zeros::<u32>(N)?];
    context.synchronize()?;
    session.start_log();
    fake_cuda::label("first");
    main.memset_zeros(&mut buffers[0])?;
    fake_cuda::label("second");
    side.memset_zeros(&mut buffers[1])?;
    let event = side.record_event(None)?;
    main.wait(&event)?;
    fake_cuda::label("third");
    main.memset_zeros(&mut buffers[0])?;
    fake_cuda::label("");
    let operations = session.operations();
    let [first, second, third] = ["first", "second", "third"]
        .map(|label| operations.iter().find(|operation| operation.label == label).expect("it was submitted"));
    assert_eq!(
        (second.stream.as_str(), second.call.as_str()),
        ("stream \"side\" of device 0", "cuMemsetD8Async")
    );
    assert!(session.may_overlap(first, second));
    assert!(!session.may_overlap(second, third) && !session.may_overlap(first, third));
    context.synchronize()
}
