//! The backend of CUDA devices.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use fsdp_comm::device::cuda::{CudaDevice, CudaError, CudaOptions, CudaStream, Priority};
use parking_lot::Mutex;

use super::updates::{CudaKernels, Steps};
use crate::comm::CommError;
use crate::device::{Attached, Backend, Memory, Slice, Stream};
use crate::spec::Dtype;

/// Bytes that are copied between pageable memory and the device at a time.
const STAGING: usize = 16 << 20;

/// A CUDA device, with candle's tensors on it.
///
/// Its compute stream is candle's own stream for the device; candle's tensors and flat buffers are ordered by it.
pub struct CudaBackend {
    attached: Attached,
    cuda: candle_core::CudaDevice,
    device: CudaDevice,
    compute: Arc<CudaStream>,
    /// Page-locked memory on the way to and from the host; made when first needed.
    staging: Mutex<Option<Slice>>,
    kernels: Arc<CudaKernels>,
}

impl CudaBackend {
    /// The device behind `tensors`.
    ///
    /// # Errors
    /// If it works on the default stream, which is another one in every thread: [`device`](super::device) makes one that does
    /// not; those of [`CudaDevice::of`].
    pub fn new(tensors: &candle_core::CudaDevice, options: &CudaOptions) -> Result<CudaBackend, CudaError> {
        let stream = tensors.cuda_stream();
        let ordinal = stream.context().ordinal();
        // The legacy and the per-thread default streams, and the null stream, are handles of small numbers.
        if stream.cu_stream().addr() <= 2 {
            return Err(CudaError::DefaultStream { ordinal });
        }
        let device = CudaDevice::of(stream, options)?;
        let compute = device.compute("compute");
        let kernels = Arc::new(CudaKernels::new(compute.clone()));
        let device_of_candle = candle_core::Device::Cuda(tensors.clone());
        Ok(CudaBackend {
            attached: Attached { device: device_of_candle, kernels: Some(kernels.clone()) },
            cuda: tensors.clone(),
            device,
            compute,
            staging: Mutex::default(),
            kernels,
        })
    }

    /// Its device, for communicators.
    pub fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// candle's device of it.
    pub(crate) fn tensors_on_cuda(&self) -> &candle_core::CudaDevice {
        &self.cuda
    }

    pub(crate) fn stream(&self) -> &Arc<CudaStream> {
        &self.compute
    }

    /// Sets what calls of [`Kernels::adamw`](crate::optim::Kernels::adamw) do. Before a capture the device has done all that
    /// it was given.
    pub(crate) fn set_steps(&self, steps: Steps) {
        self.kernels.set_steps(steps);
    }

    /// Copies the tables of scalars that were written and not copied.
    pub(crate) fn copy_tables(&self) -> Result<(), CommError> {
        self.kernels.copy_tables()
    }

    /// Calls `step` with the parts of `len` bytes that fit into page-locked memory, and with so much of it.
    fn in_parts(
        &self,
        slice: &Slice,
        mut step: impl FnMut(std::ops::Range<usize>, &Slice, &Slice) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let mut staging = self.staging.lock();
        let elements = STAGING / slice.dtype().size();
        for start in (0..slice.len()).step_by(elements) {
            let part = slice.range(start..(start + elements).min(slice.len()));
            let held = match &*staging {
                Some(held) => held.clone(),
                None => {
                    // SAFETY: it is used under the lock only, and each copy to or from it is waited for there.
                    let held =
                        unsafe { Slice::zeros_in(&self.device.pinned(), Dtype::F32, STAGING / 4, None) }?;
                    staging.insert(held).clone()
                }
            };
            let held = held.reinterpreted(part.dtype(), part.len());
            let first = start * part.dtype().size();
            step(first..first + part.bytes(), &part, &held)?;
        }
        Ok(())
    }
}

impl fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaBackend({})", self.device.name())
    }
}

// SAFETY: copies go through staging memory, between the slice and the bytes, on the compute stream, and the host waits for
// each. The compute stream is the one that candle has for the device.
unsafe impl Backend for CudaBackend {
    fn memory(&self) -> Arc<dyn Memory> {
        Arc::new(self.device.memory())
    }

    fn compute(&self) -> Arc<dyn Stream> {
        self.compute.clone()
    }

    fn side(&self, name: String) -> Result<Arc<dyn Stream>, CommError> {
        let stream = self.device.stream(name.clone(), Priority::High);
        stream
            .map(|stream| stream as Arc<dyn Stream>)
            .map_err(|error| CommError::Stream { stream: name, message: error.to_string() })
    }

    fn download(&self, from: &Slice, to: &mut [u8]) -> Result<(), CommError> {
        assert_eq!(from.bytes(), to.len(), "a copy to memory of another length");
        self.in_parts(from, |bytes, part, held| {
            self.compute.copy(part, held)?;
            self.compute.record().synchronize()?;
            // SAFETY: the copy to it is done, as the event says; `in_parts` holds the lock of the staging memory, and no other
            // copy is under way on it.
            to[bytes].copy_from_slice(unsafe { held.as_bytes() });
            Ok(())
        })
    }

    fn upload(&self, from: &[u8], to: &Slice) -> Result<(), CommError> {
        assert_eq!(from.len(), to.bytes(), "a copy from memory of another length");
        self.in_parts(to, |bytes, part, held| {
            // SAFETY: the last copy from it was waited for below; `in_parts` holds the lock of the staging memory.
            unsafe { held.as_mut_bytes() }.copy_from_slice(&from[bytes]);
            self.compute.copy(held, part)?;
            self.compute.record().synchronize()
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn attached(&self) -> Option<&dyn Any> {
        Some(&self.attached)
    }
}
