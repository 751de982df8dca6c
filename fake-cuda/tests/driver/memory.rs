//! Memory: freed too early, twice or never, and bytes that are not there.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DriverError, result};
use fake_cuda::{Kind, Schedule, Session};

const N: usize = 256;

type Setup = (Arc<CudaContext>, Arc<CudaStream>, Arc<CudaStream>);

fn setup() -> Result<Setup, DriverError> {
    let context = CudaContext::new(0)?;
    // SAFETY: the tests order the streams themselves, or mean not to.
    unsafe { context.disable_event_tracking() };
    let streams = (context.new_stream()?, context.new_stream()?);
    Ok((context, streams.0, streams.1))
}

#[test]
fn a_free_in_stream_order_must_wait_for_readers_on_other_streams() -> Result<(), DriverError> {
    for schedule in Schedule::all(10) {
        let session = Session::new(schedule);
        let (context, owner, reader) = setup()?;
        let source = owner.clone_htod(&[1u32; N])?;
        let mut copy = reader.alloc_zeros::<u32>(N)?;
        reader.wait(&owner.record_event(None)?)?;
        reader.memcpy_dtod(&source, &mut copy)?;
        drop(source);
        session.expect(Kind::FreeInFlight, "frees 1024 bytes of memory of device 0 from cuMemAllocAsync");
        context.synchronize()?;
    }
    Ok(())
}

#[test]
fn a_free_that_waits_is_sound() -> Result<(), DriverError> {
    for schedule in Schedule::all(50) {
        let _session = Session::new(schedule);
        let (context, owner, reader) = setup()?;
        let source = owner.clone_htod(&[1u32; N])?;
        let mut copy = reader.alloc_zeros::<u32>(N)?;
        reader.wait(&owner.record_event(None)?)?;
        reader.memcpy_dtod(&source, &mut copy)?;
        owner.wait(&reader.record_event(None)?)?;
        drop(source);
        assert_eq!(reader.clone_dtoh(&copy)?, [1; N]);
        context.synchronize()?;
    }
    Ok(())
}

#[test]
fn what_runs_after_a_free_reads_a_pattern() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Latest);
    let (context, owner, reader) = setup()?;
    let source = owner.clone_htod(&[1.0f32; N])?;
    let mut copy = reader.alloc_zeros::<f32>(N)?;
    context.synchronize()?;
    reader.memcpy_dtod(&source, &mut copy)?;
    drop(source);
    owner.synchronize()?;
    assert!(reader.clone_dtoh(&copy)?.iter().all(|x| x.is_nan()));
    session.take_findings();
    context.synchronize()
}

#[test]
fn memory_that_was_never_written_reads_as_nan() -> Result<(), DriverError> {
    let _session = Session::new(Schedule::Latest);
    let (context, stream, _) = setup()?;
    // SAFETY: the pattern of fresh memory is a value of each of the types.
    let (wide, narrow) = unsafe { (stream.alloc::<f32>(N)?, stream.alloc::<half::bf16>(N)?) };
    assert!(stream.clone_dtoh(&wide)?.iter().all(|x| x.is_nan()));
    assert!(stream.clone_dtoh(&narrow)?.iter().all(|x| x.is_nan()));
    drop((wide, narrow));
    context.synchronize()
}

#[test]
fn a_use_before_the_allocation_in_stream_order_is_found() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Earliest);
    let (context, owner, other) = setup()?;
    // SAFETY: the values are written before they are read.
    let mut values = unsafe { owner.alloc::<u32>(N)? };
    other.memset_zeros(&mut values)?;
    session.expect(Kind::Race, "which allocates");
    context.synchronize()
}

#[test]
fn a_use_after_the_free_is_found_although_the_free_has_run() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Earliest);
    let (context, stream, _) = setup()?;
    let values = stream.alloc_zeros::<u32>(N)?;
    let address = values.leak();
    // SAFETY: the memory is ours; that it is used afterwards is what is tested.
    unsafe {
        result::free_async(address, stream.cu_stream())?;
        result::memset_d8_async(address, 0, N, stream.cu_stream())?;
    }
    session.expect(Kind::UseAfterFree, "cuMemFreeAsync");
    context.synchronize()
}

#[test]
fn a_double_free_is_refused() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Latest);
    let (context, stream, _) = setup()?;
    let address = stream.alloc_zeros::<u32>(N)?.leak();
    // SAFETY: the second call must be refused.
    unsafe {
        result::free_async(address, stream.cu_stream())?;
        assert!(result::free_async(address, stream.cu_stream()).is_err());
    }
    session.expect(Kind::DoubleFree, "which cuMemFreeAsync has freed already");
    context.synchronize()
}

#[test]
fn a_free_at_once_must_have_waited() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Latest);
    let (context, stream, _) = setup()?;
    context.bind_to_thread()?;
    // SAFETY: the memory is ours.
    unsafe {
        let address = result::malloc_sync(N)?;
        result::memset_d8_async(address, 0, N, stream.cu_stream())?;
        result::free_sync(address)?;
        session.expect(Kind::FreeInFlight, "without waiting for cuMemsetD8Async");
        let address = result::malloc_sync(N)?;
        result::memset_d8_async(address, 0, N, stream.cu_stream())?;
        stream.synchronize()?;
        result::free_sync(address)?;
    }
    Ok(())
}

#[test]
fn what_is_not_freed_is_a_leak() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Latest);
    let (context, stream, other) = setup()?;
    stream.alloc_zeros::<u32>(N)?.leak();
    std::mem::forget(context.new_event(None)?);
    drop((stream, other));
    drop(context);
    // The forgotten event holds the context; the session's end would report the same.
    let findings = end_of(session);
    assert!(findings.contains("1024 bytes of memory of device 0 from cuMemAllocAsync"), "{findings}");
    assert!(findings.contains("event 0 of device 0"), "{findings}");
    Ok(())
}

/// The panic of a session that ends with findings.
fn end_of(session: Session) -> String {
    let panic =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(session))).expect_err("findings");
    panic.downcast_ref::<String>().cloned().unwrap_or_default()
}

#[test]
fn accesses_outside_of_memory_are_refused() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Latest);
    let (context, stream, _) = setup()?;
    let values = stream.alloc_zeros::<u8>(N)?;
    let address = values.leak();
    // SAFETY: the calls must be refused, but for the last.
    unsafe {
        assert!(result::memset_d8_async(address + 16, 0, N, stream.cu_stream()).is_err());
        session.expect(Kind::InvalidAccess, "touches 256 bytes at offset 16 of 256 bytes");
        assert!(result::memset_d8_async(0x1000, 0, N, stream.cu_stream()).is_err());
        session.expect(Kind::InvalidAccess, "no memory");
        assert!(result::free_async(address + 16, stream.cu_stream()).is_err());
        session.expect(Kind::InvalidAccess, "where no allocation starts");
        result::free_async(address, stream.cu_stream())?;
    }
    context.synchronize()
}

#[test]
fn usage_is_counted_and_memory_runs_out() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Latest);
    session.set_devices(2, 1 << 20);
    let (context, stream, _) = setup()?;
    let first = stream.alloc_zeros::<u8>(1000)?;
    let second = stream.alloc_zeros::<u8>(500)?;
    drop(first);
    assert_eq!((session.usage(0).now, session.usage(0).peak), (500, 1500));
    assert_eq!(session.usage(1).peak, 0);
    assert!(stream.alloc_zeros::<u8>(1 << 20).is_err());
    session.fail_allocation(1);
    let third = stream.alloc_zeros::<u8>(1)?;
    assert!(stream.alloc_zeros::<u8>(1).is_err());
    let fourth = stream.alloc_zeros::<u8>(1)?;
    drop((second, third, fourth));
    assert_eq!(CudaContext::device_count()?, 2);
    context.synchronize()
}

#[test]
fn memory_pools_serve_allocations() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Latest);
    let (context, stream, _) = setup()?;
    // SAFETY: the device is that of the context, the memory ours.
    unsafe {
        let pool = result::device::get_default_mem_pool(context.cu_device())?;
        let address = result::mem_pool::alloc_async(pool, N, stream.cu_stream())?;
        assert_eq!(session.usage(0).now, N);
        result::free_async(address, stream.cu_stream())?;
    }
    context.synchronize()
}
