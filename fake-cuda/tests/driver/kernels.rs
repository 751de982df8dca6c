//! Launches run as the functions that a test registers, on the memory that they say they use.

use std::sync::{Arc, Mutex};

use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, CudaStream, DriverError, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use fake_cuda::{Access, Kind, Schedule, Session};

const N: usize = 300;

/// `void scaled(const float* in, float* out, float scale, int n)`
fn register(session: &Session) {
    let bytes = |launch: &fake_cuda::Launch<'_>| launch.param::<i32>(3) as usize * 4;
    session.kernel(
        "scaled",
        &[8, 8, 4, 4],
        move |launch| {
            vec![Access::read(launch.param(0), bytes(launch)), Access::write(launch.param(1), bytes(launch))]
        },
        |launch| {
            let scale = launch.param::<f32>(2);
            let threads = (launch.grid()[0] * launch.block()[0]) as usize;
            let n = (launch.param::<i32>(3) as usize).min(threads);
            let values = launch.read::<f32>(launch.param(0), n);
            launch.write(launch.param(1), &values.iter().map(|x| scale * x).collect::<Vec<_>>());
        },
    );
}

fn setup() -> Result<(Arc<CudaContext>, Arc<CudaStream>), DriverError> {
    let context = CudaContext::new(0)?;
    // SAFETY: the tests order the streams themselves, or mean not to.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream()?;
    Ok((context, stream))
}

#[test]
fn a_kernel_computes_in_stream_order() -> Result<(), DriverError> {
    for schedule in Schedule::all(5) {
        let session = Session::new(schedule);
        register(&session);
        let (context, stream) = setup()?;
        let module = context.load_module(Ptx::from_src(Session::image(["scaled", "other"])))?;
        let scaled = module.load_function("scaled")?;
        let source = stream.clone_htod(&[1.5f32; N])?;
        let mut target = stream.alloc_zeros::<f32>(N)?;
        let (scale, n) = (2.0f32, N as i32);
        let mut launch = stream.launch_builder(&scaled);
        launch.arg(&source).arg(&mut target).arg(&scale).arg(&n);
        // SAFETY: the arguments are those of the kernel.
        unsafe { launch.launch(LaunchConfig::for_num_elems(N as u32)) }?;
        assert_eq!(stream.clone_dtoh(&target)?, [3.0; N]);
        drop((source, target));
        context.synchronize()?;
    }
    Ok(())
}

#[test]
fn a_kernel_that_waits_for_nothing_races() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Earliest);
    register(&session);
    let (context, stream) = setup()?;
    let other = context.new_stream()?;
    let scaled = context.load_module(Ptx::from_src(Session::image(["scaled"])))?.load_function("scaled")?;
    let source = other.clone_htod(&[1.5f32; N])?;
    let mut target = stream.alloc_zeros::<f32>(N)?;
    let (scale, n) = (2.0f32, N as i32);
    let mut launch = stream.launch_builder(&scaled);
    launch.arg(&source).arg(&mut target).arg(&scale).arg(&n);
    // SAFETY: the arguments are those of the kernel.
    unsafe { launch.launch(LaunchConfig::for_num_elems(N as u32)) }?;
    session.expect(Kind::Race, "scaled");
    context.synchronize()
}

#[test]
fn a_kernel_that_reaches_past_its_memory_is_refused() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Earliest);
    register(&session);
    let (context, stream) = setup()?;
    let scaled = context.load_module(Ptx::from_src(Session::image(["scaled"])))?.load_function("scaled")?;
    let source = stream.clone_htod(&[1.5f32; N])?;
    let mut target = stream.alloc_zeros::<f32>(N)?;
    let (scale, n) = (2.0f32, N as i32 + 1);
    let mut launch = stream.launch_builder(&scaled);
    launch.arg(&source).arg(&mut target).arg(&scale).arg(&n);
    // SAFETY: the launch must be refused.
    assert!(unsafe { launch.launch(LaunchConfig::for_num_elems(N as u32)) }.is_err());
    session.expect(Kind::InvalidAccess, "touches 1204 bytes at offset 0 of 1200 bytes");
    context.synchronize()
}

#[test]
fn an_impossible_shape_or_an_unknown_kernel_is_refused() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Latest);
    register(&session);
    let (context, stream) = setup()?;
    let module = context.load_module(Ptx::from_src(Session::image(["scaled", "unregistered"])))?;
    assert!(module.load_function("absent").is_err());
    assert_eq!(session.findings(), []);
    assert!(module.load_function("unregistered").is_err());
    session.expect(Kind::Unsupported, "no test has registered it");
    let scaled = module.load_function("scaled")?;
    let mut launch = stream.launch_builder(&scaled);
    let shape = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1025, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the launch must be refused before its arguments are read.
    assert!(unsafe { launch.launch(shape) }.is_err());
    session.expect(Kind::Misuse, "which no device runs");
    Ok(())
}

#[test]
fn a_kernel_knows_what_the_host_has_copied_to_where_a_parameter_points() -> Result<(), DriverError> {
    let session = Session::new(Schedule::Latest);
    let known = Arc::new(Mutex::new(Vec::new()));
    let seen = known.clone();
    session.kernel(
        "shaped",
        &[8, 8],
        move |launch| {
            seen.lock().expect("nothing panics").push(launch.uploaded::<u64>(0));
            vec![Access::read(launch.param(0), 16)]
        },
        |_| {},
    );
    let (context, stream) = setup()?;
    let shaped = context.load_module(Ptx::from_src(Session::image(["shaped"])))?.load_function("shaped")?;
    let mut shape = stream.clone_htod(&[3u64, 5])?;
    let launch = |shape: &_| {
        // SAFETY: the arguments are those of the kernel.
        unsafe {
            stream.launch_builder(&shaped).arg(shape).arg(&0u64).launch(LaunchConfig::for_num_elems(1))
        }?;
        known
            .lock()
            .expect("nothing panics")
            .drain(..)
            .next()
            .ok_or(DriverError(CUresult::CUDA_ERROR_UNKNOWN))
    };
    assert_eq!(launch(&shape)?, Some(vec![3, 5]));
    stream.memcpy_htod(&[7u64, 9], &mut shape)?;
    assert_eq!(launch(&shape)?, Some(vec![7, 9]));
    // A part of it is written by something that is known when it runs only.
    stream.memset_zeros(&mut shape.slice_mut(1..))?;
    assert_eq!(launch(&shape)?, None);
    drop(shape);
    context.synchronize()
}
