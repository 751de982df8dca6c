//! candle's CUDA devices, and kernels of `fsdp-kernels` on its storage.

use std::ffi::c_void;
use std::ptr::from_ref;

use candle_core::CudaStorage;
use candle_core::cuda_backend::CudaStorageSlice;
use cudarc::driver as cuda;
use cudarc::driver::DevicePtr;
use fsdp_kernels::{AccumulateArgs, Args};

use fsdp_comm::device::cuda::{CudaError, compiled, device_count, kernel_dtype, max_blocks, words};

use crate::device::Slice;

/// candle's device `ordinal`, with a stream of its own: what a rank passes to
/// [`OnDevice::on`](crate::device::OnDevice::on). Ranks that share a device make one each.
///
/// # Errors
/// If the driver is not installed, there is no such device, or it does not work.
pub fn device(ordinal: usize) -> Result<candle_core::Device, CudaError> {
    let count = device_count()?;
    if ordinal >= count {
        return Err(CudaError::NoDevice { ordinal, count });
    }
    candle_core::Device::new_cuda_with_stream(ordinal).map_err(|error| CudaError::Call {
        ordinal,
        call: "opening the device",
        message: error.to_string(),
    })
}

/// Launches a kernel of `fsdp-kernels` on candle's stream of `device`. The kernels are compiled when the first one is
/// launched.
///
/// # Errors
/// If they do not compile, and those of the driver.
///
/// # Safety
/// `args` are those of the kernel `name`; what they point to is memory of this device, which the order of candle's stream
/// lets the kernel use, and which is not given back before it in that order.
pub unsafe fn launch<A: Args>(
    device: &candle_core::CudaDevice,
    name: &'static str,
    args: &A,
) -> candle_core::Result<()> {
    let stream = device.cuda_stream();
    let context = stream.context();
    let Some(launch) = args.launch(max_blocks(context).map_err(candle_core::Error::wrap)?) else {
        return Ok(());
    };
    let ptx = compiled(context).map_err(candle_core::Error::wrap)?;
    let function = device.get_or_load_custom_func(name, "fsdp-kernels", &ptx)?;
    context.bind_to_thread().map_err(candle_core::Error::wrap)?;
    let mut parameters = [from_ref(args).cast_mut().cast::<c_void>()];
    let [x, y] = launch.grid;
    // SAFETY: the function's one parameter is a struct with the layout of `A`, which the driver copies; the rest is the
    // caller's promise.
    let launched = unsafe {
        cuda::result::launch_kernel(
            function.cu_function(),
            (x, y, 1),
            (launch.threads, 1, 1),
            launch.shared_bytes,
            stream.cu_stream(),
            &mut parameters,
        )
    };
    launched.map_err(|error| candle_core::Error::msg(format!("kernel {name}: {}", words(error))))
}

/// Writes the elements of candle's storage from `start` on into `to`, or adds them, on candle's stream.
///
/// # Errors
/// If the storage is of another dtype than f32, bf16 or f16 or too short, and those of [`launch`].
///
/// # Safety
/// The order of candle's stream lets it write `to`, which is memory of its device.
pub(crate) unsafe fn accumulate(
    storage: &CudaStorage,
    start: usize,
    to: &Slice,
    add: bool,
) -> candle_core::Result<()> {
    let stream = storage.device.cuda_stream();
    let (address_of, len, dtype) = match &storage.slice {
        CudaStorageSlice::F32(values) => {
            (values.device_ptr(&stream).0, values.len(), fsdp_kernels::Dtype::F32)
        }
        CudaStorageSlice::BF16(values) => {
            (values.device_ptr(&stream).0, values.len(), fsdp_kernels::Dtype::BF16)
        }
        CudaStorageSlice::F16(values) => {
            (values.device_ptr(&stream).0, values.len(), fsdp_kernels::Dtype::F16)
        }
        _ => candle_core::bail!("a gradient is of f32, bf16 or f16"),
    };
    if start + to.len() > len {
        candle_core::bail!("{} elements from {start} on, of {len}", to.len());
    }
    let args = AccumulateArgs {
        acc: to.as_ptr().addr() as u64,
        values: address_of + (start * dtype.size()) as u64,
        len: to.len() as u64,
        beta: if add { 1.0 } else { 0.0 },
        scale: 1.0,
    };
    // SAFETY: the arguments are of this kernel, inside of both buffers; candle frees its storage in the order of this
    // stream, and for `to` the caller promises it.
    unsafe { launch(&storage.device, fsdp_kernels::accumulate(dtype, kernel_dtype(to.dtype())), &args) }
}
