//! Kernels of `fsdp-kernels` that models launch, on the fake driver.

use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaStream, DevicePtrMut, DeviceRepr, DriverError, LaunchConfig, PushKernelArg,
};
use cudarc::nvrtc::Ptx;
use fake_cuda::{Schedule, Session};
use fsdp_kernels::{Args, Dtype, FillArgs, fill, host};
use fsdp_test_fake_cuda::register_fsdp_kernels;

const N: usize = 300;

fn setup() -> Result<(Arc<CudaContext>, Arc<CudaStream>), DriverError> {
    let context = CudaContext::new(0)?;
    // SAFETY: the tests order the streams themselves, or mean not to.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream()?;
    Ok((context, stream))
}

#[derive(Clone, Copy)]
#[repr(transparent)]
struct Fill(FillArgs);

// SAFETY: the arguments are plain data of C's layout.
unsafe impl DeviceRepr for Fill {}

#[test]
fn kernels_that_models_launch_run_as_their_emulation_does() -> Result<(), DriverError> {
    if !host::available() {
        eprintln!("skipped: no C++ compiler was found for the emulation");
        return Ok(());
    }
    let session = Session::new(Schedule::Latest);
    let image = register_fsdp_kernels();
    let (context, stream) = setup()?;
    let function = context.load_module(Ptx::from_src(image))?.load_function(fill(Dtype::BF16))?;
    let mut target = stream.alloc_zeros::<u16>(N)?;
    let args = {
        let (to, _guard) = target.device_ptr_mut(&stream);
        FillArgs { to, len: N as u64 - 1, value: 1.5 }
    };
    let shape = args.launch(4).expect("it is not empty");
    let config = LaunchConfig {
        grid_dim: (shape.grid[0], shape.grid[1], 1),
        block_dim: (shape.threads, 1, 1),
        shared_mem_bytes: shape.shared_bytes,
    };
    // SAFETY: the arguments are those of the kernel.
    unsafe { stream.launch_builder(&function).arg(&Fill(args)).launch(config) }?;
    assert!(session.pending() > 0, "it has run before anybody waited");
    let filled = stream.clone_dtoh(&target)?;
    assert!(filled[..N - 1].iter().all(|x| *x == 0x3fc0) && filled[N - 1] == 0, "{filled:x?}");
    drop(target);
    context.synchronize()
}
