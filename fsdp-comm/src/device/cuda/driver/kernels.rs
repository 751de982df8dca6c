//! The kernels of `fsdp-kernels`, on a device.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::from_ref;
use std::sync::{Arc, LazyLock};

use cudarc::driver as cuda;
use cudarc::nvrtc;
use fsdp_kernels::{AccumulateArgs, Args, CastArgs, Launch, OPTIONS, SOURCE, SumRanksArgs};
use parking_lot::Mutex;

use super::block::{Place, place};
use super::copy::address;
use super::device::{CudaDevice, KernelImage};
use super::error::{of_nvrtc, words};
use super::libraries;
use super::stream::CudaStream;
use crate::device::cuda::CudaError;
use crate::device::{Accumulate, Elementwise, Fill, Op, Slice, Stream};
use crate::error::CommError;
use crate::spec::Dtype;

/// The module on one device, with the functions that were asked for.
pub(super) struct Kernels {
    module: Arc<cuda::CudaModule>,
    functions: Mutex<HashMap<&'static str, cuda::CudaFunction>>,
    /// Enough to fill the device.
    max_blocks: u32,
}

/// What NVRTC has made in this process, by compute capability: PTX.
static COMPILED: LazyLock<Mutex<Compiled>> = LazyLock::new(Mutex::default);

type Compiled = HashMap<(i32, i32), Arc<str>>;

impl Kernels {
    pub fn load(context: &Arc<cuda::CudaContext>, image: &KernelImage) -> Result<Kernels, CudaError> {
        let ordinal = context.ordinal();
        let call = |call| move |error| CudaError::Call { ordinal, call, message: words(error) };
        let ptx = match image {
            KernelImage::Ptx(text) => nvrtc::Ptx::from_src(text),
            KernelImage::Compile => nvrtc::Ptx::from_src(&*compiled(context)?),
        };
        let module = context.load_module(ptx).map_err(call("loading the kernels"))?;
        let max_blocks = max_blocks(context)?;
        Ok(Kernels { module, functions: Mutex::default(), max_blocks })
    }

    /// Blocks enough to fill the device.
    pub fn max_blocks(&self) -> u32 {
        self.max_blocks
    }

    fn function(&self, name: &'static str) -> Result<cuda::CudaFunction, cuda::DriverError> {
        let mut functions = self.functions.lock();
        if let Some(function) = functions.get(name) {
            return Ok(function.clone());
        }
        let function = self.module.load_function(name)?;
        functions.insert(name, function.clone());
        Ok(function)
    }

    /// Launches a kernel on `stream`, which uses `slices`.
    ///
    /// # Safety
    /// `args` are those of the kernel `name`, and what they point to is in `slices`; the caller's stream order lets the
    /// kernel use it.
    pub unsafe fn launch<A: Args>(
        &self,
        stream: &CudaStream,
        name: &'static str,
        args: &A,
        slices: &[&Slice],
    ) -> Result<(), CommError> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_as(stream, name, args, args.launch(self.max_blocks), slices) }
    }

    /// The same with a grid of its own; `None` is no work.
    ///
    /// # Safety
    /// As for [`Kernels::launch`].
    pub unsafe fn launch_as<A: Args>(
        &self,
        stream: &CudaStream,
        name: &'static str,
        args: &A,
        launch: Option<Launch>,
        slices: &[&Slice],
    ) -> Result<(), CommError> {
        let Some(launch) = launch else { return Ok(()) };
        stream.enqueue(name, slices, |stream| {
            let function = self.function(name)?;
            let mut parameters = [from_ref(args).cast_mut().cast::<c_void>()];
            let [x, y] = launch.grid;
            // SAFETY: the function's one parameter is a struct with the layout of `A`, which the driver copies; the
            // rest is the caller's promise.
            unsafe {
                cuda::result::launch_kernel(
                    function.cu_function(),
                    (x, y, 1),
                    (launch.threads, 1, 1),
                    launch.shared_bytes,
                    stream.cu_stream(),
                    &mut parameters,
                )
            }
        })
    }

    pub fn elementwise(&self, stream: &CudaStream, op: Elementwise) -> Result<(), CommError> {
        match op.op() {
            Op::Fill(slice, value) => fill(stream, slice, *value),
            Op::Scale(slice, factor) => {
                check(stream, &[slice])?;
                let name = fsdp_kernels::accumulate(dtype(slice), dtype(slice));
                let len = slice.len() as u64;
                let args = AccumulateArgs { acc: address(slice), values: 0, len, beta: *factor, scale: 0.0 };
                // SAFETY: the arguments are of this kernel, and `len` those of the slice; `values` is not read with a scale
                // of 0.
                unsafe { self.launch(stream, name, &args, &[slice]) }
            }
            Op::Cast(from, to) if from.dtype() == to.dtype() => stream.copy(from, to),
            Op::Cast(from, to) => {
                check(stream, &[from, to])?;
                let name = fsdp_kernels::cast(dtype(from), dtype(to));
                let args = CastArgs { from: address(from), to: address(to), len: from.len() as u64 };
                // SAFETY: the arguments are of this kernel; that the lengths are equal, and the slices apart, was checked
                // when the op was made.
                unsafe { self.launch(stream, name, &args, &[from, to]) }
            }
            Op::Move(average, weights, decay) => {
                check(stream, &[average, weights])?;
                let name = fsdp_kernels::accumulate(dtype(weights), dtype(average));
                let (acc, values, len) = (address(average), address(weights), average.len() as u64);
                let scale = (1.0 - decay) as f32;
                let args = AccumulateArgs { acc, values, len, beta: 1.0 - scale, scale };
                // SAFETY: as above.
                unsafe { self.launch(stream, name, &args, &[average, weights]) }
            }
            Op::Swap(a, b) => {
                // SAFETY: it is used by the copies below only, on one stream.
                let kept = unsafe { Slice::zeros_in(&stream.device().memory(), a.dtype(), a.len(), None) }?;
                // The memory is there in the order of the compute stream.
                let compute = stream.device().compute("compute");
                stream.wait(&compute.record())?;
                stream.copy(a, &kept)?;
                stream.copy(b, a)?;
                stream.copy(&kept, b)
            }
        }
    }

    fn sum_ranks(
        &self,
        stream: &CudaStream,
        sources: &[Slice],
        out: &Slice,
        scale: f32,
        accumulate: Accumulate,
    ) -> Result<(), CommError> {
        let slices: Vec<&Slice> = sources.iter().chain([out]).collect();
        check(stream, &slices)?;
        let refuse = |message| CommError::Stream { stream: stream.name().to_owned(), message };
        if sources.len() > fsdp_kernels::MAX_RANKS {
            let (ranks, most) = (sources.len(), fsdp_kernels::MAX_RANKS);
            return Err(refuse(format!("{ranks} ranks share a device, at most {most} can")));
        }
        let Some(from) = sources.first().map(Slice::dtype) else {
            return Err(refuse("a sum of nothing".to_owned()));
        };
        let fits = |source: &Slice| {
            let in_place = source.as_ptr() == out.as_ptr() && source.dtype() == out.dtype();
            source.dtype() == from && source.len() == out.len() && (in_place || !source.overlaps(out))
        };
        if let Some(wrong) = sources.iter().position(|source| !fits(source)) {
            return Err(refuse(format!(
                "part {wrong} of a sum differs in length or dtype, or overlaps the sum"
            )));
        }
        let Some(name) = fsdp_kernels::sum_ranks(kernel_dtype(from), dtype(out)) else {
            return Err(refuse(format!("a sum of {from} cannot be stored as {}", out.dtype())));
        };
        let addresses: Vec<u64> = sources.iter().map(address).collect();
        let add = accumulate == Accumulate::Add;
        let args = SumRanksArgs::new(&addresses, address(out), out.len() as u64, scale, add);
        // SAFETY: the arguments are of this kernel for these dtypes; all slices are of the device and as long, and the sum is
        // one of its parts or apart from all, as checked above.
        unsafe { self.launch(stream, name, &args, &slices) }
    }
}

impl CudaStream {
    /// `out (+)= scale * (sources[0] + sources[1] + ..)`, summed in this order in f32, rounded once.
    ///
    /// # Errors
    /// If the sources differ in dtype, or one from `out` in length, if `out` is neither of f32 nor of the sources' dtype, or
    /// overlaps a source without being it; if memory is of another device; those of the driver.
    pub fn sum_ranks(
        &self,
        sources: &[Slice],
        out: &Slice,
        scale: f32,
        accumulate: Accumulate,
    ) -> Result<(), CommError> {
        self.device().state().kernels.sum_ranks(self, sources, out, scale, accumulate)
    }

    /// Launches a kernel of `fsdp-kernels` on this stream, which uses `slices`, with a grid of its own; `None` is no work.
    ///
    /// # Errors
    /// If `slices` are not memory of the stream's device; those of [`CudaStream::enqueue`].
    ///
    /// # Safety
    /// `args` are those of the kernel `name`, and what they point to is in `slices`; the caller's stream order lets the
    /// kernel use it.
    pub unsafe fn launch<A: Args>(
        &self,
        name: &'static str,
        args: &A,
        launch: Option<Launch>,
        slices: &[&Slice],
    ) -> Result<(), CommError> {
        check(self, slices)?;
        // SAFETY: the caller's promise.
        unsafe { self.device().state().kernels.launch_as(self, name, args, launch, slices) }
    }

    /// Blocks enough to fill the stream's device.
    pub fn max_blocks(&self) -> u32 {
        self.device().state().kernels.max_blocks()
    }

    /// Checks that `slices` are memory of the stream's device.
    ///
    /// # Errors
    /// [`CommError::Stream`] if one is not.
    pub fn reaches(&self, slices: &[&Slice]) -> Result<(), CommError> {
        check(self, slices)
    }
}

/// Blocks enough to fill the device.
///
/// # Errors
/// Those of the driver.
pub fn max_blocks(context: &cuda::CudaContext) -> Result<u32, CudaError> {
    let processors = cuda::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let processors = context.attribute(processors).map_err(|error| CudaError::Call {
        ordinal: context.ordinal(),
        call: "counting multiprocessors",
        message: words(error),
    })?;
    Ok(8 * u32::try_from(processors).unwrap_or(1))
}

/// The kernels for the architecture of a device, as PTX.
///
/// # Errors
/// If NVRTC is not installed, or they do not compile; those of the driver.
pub fn compiled(context: &cuda::CudaContext) -> Result<Arc<str>, CudaError> {
    let ordinal = context.ordinal();
    let (major, minor) = context.compute_capability().map_err(|error| CudaError::Call {
        ordinal,
        call: "asking for the architecture",
        message: words(error),
    })?;
    let mut compiled = COMPILED.lock();
    if let Some(ptx) = compiled.get(&(major, minor)) {
        return Ok(ptx.clone());
    }
    if !libraries::has_nvrtc() {
        return Err(CudaError::MissingLibrary {
            library: "NVRTC (libnvrtc.so)",
            install: "install the CUDA toolkit, or the package `nvidia-cuda-nvrtc` and put its folder on LD_LIBRARY_PATH",
        });
    }
    let options = OPTIONS.iter().map(|option| (*option).to_owned());
    let options = options.chain([format!("--gpu-architecture=compute_{major}{minor}")]).collect();
    let options = nvrtc::CompileOptions { options, ..Default::default() };
    let ptx = nvrtc::compile_ptx_with_opts(SOURCE, options);
    let ptx: Arc<str> = ptx.map_err(|error| of_nvrtc(ordinal, &error))?.to_src().into();
    compiled.insert((major, minor), ptx.clone());
    Ok(ptx)
}

/// Zeros, or a NaN of the dtype in every element: `f32::NAN`, `bf16::NAN`, `f16::NAN`.
fn fill(stream: &CudaStream, slice: &Slice, value: Fill) -> Result<(), CommError> {
    check(stream, &[slice])?;
    let (ptr, len, bytes) = (address(slice), slice.len(), slice.bytes());
    stream.enqueue("filling memory", &[slice], |stream| {
        let stream = stream.cu_stream();
        // SAFETY: the range is that of the slice, alive until the fill is done by the use that is noted.
        unsafe {
            match (value, slice.dtype()) {
                (Fill::Zero, _) => cuda::result::memset_d8_async(ptr, 0, bytes, stream),
                (Fill::Poison, Dtype::F32) => {
                    cuda::sys::cuMemsetD32Async(ptr, f32::NAN.to_bits(), len, stream).result()
                }
                (Fill::Poison, Dtype::BF16) => {
                    cuda::sys::cuMemsetD16Async(ptr, half::bf16::NAN.to_bits(), len, stream).result()
                }
                (Fill::Poison, Dtype::F16) => {
                    cuda::sys::cuMemsetD16Async(ptr, half::f16::NAN.to_bits(), len, stream).result()
                }
            }
        }
    })
}

/// Kernels reach memory of their device only.
pub(super) fn check(stream: &CudaStream, slices: &[&Slice]) -> Result<(), CommError> {
    let device: &CudaDevice = stream.device();
    let wrong = slices.iter().map(|slice| place(device, slice)).find(|place| *place != Place::Device);
    wrong.map_or(Ok(()), |place| {
        let message = format!("{place:?} memory in work of {}", device.name());
        Err(CommError::Stream { stream: stream.name().to_owned(), message })
    })
}

fn dtype(slice: &Slice) -> fsdp_kernels::Dtype {
    kernel_dtype(slice.dtype())
}

/// A dtype as the kernels name it.
pub fn kernel_dtype(dtype: Dtype) -> fsdp_kernels::Dtype {
    match dtype {
        Dtype::F32 => fsdp_kernels::Dtype::F32,
        Dtype::BF16 => fsdp_kernels::Dtype::BF16,
        Dtype::F16 => fsdp_kernels::Dtype::F16,
    }
}
