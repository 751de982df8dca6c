//! Elements in device memory: those of candle's storage, and new ones for results.

use std::marker::PhantomData;

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _, DeviceRepr};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Device, Layout, Result, Shape, Storage, Tensor, bail};
use fsdp_kernels::{DevicePtr, Dtype};
use half::{bf16, f16};

use super::is_captured;

/// Elements for reading.
#[derive(Clone, Copy)]
pub struct View<'a> {
    device: &'a CudaDevice,
    at: DevicePtr,
    len: usize,
    dtype: Dtype,
}

impl<'a> View<'a> {
    /// Those of a contiguous tensor of f32, bf16 or f16.
    pub fn new(op: &str, storage: &'a CudaStorage, layout: &Layout) -> Result<Self> {
        let (at, len, dtype) = locate(op, storage, layout)?;
        Ok(View { device: &storage.device, at, len, dtype })
    }

    /// The same of a tensor.
    pub fn of(op: &str, tensor: &'a Tensor) -> Result<Self> {
        let device = super::device(op, tensor)?;
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { bail!("{op}: expected a tensor on a CUDA device") };
        let (at, len, dtype) = locate(op, storage, layout)?;
        Ok(View { device, at, len, dtype })
    }

    pub fn device(self) -> &'a CudaDevice {
        self.device
    }

    pub fn at(self) -> DevicePtr {
        self.at
    }

    pub fn len(self) -> usize {
        self.len
    }

    pub fn dtype(self) -> Dtype {
        self.dtype
    }

    /// `len` of them from `start` on.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn part(self, start: usize, len: usize) -> Self {
        let inside = start.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(inside, "{len} elements from {start} on, of {}", self.len);
        View { at: self.at + (start * self.dtype.size()) as u64, len, ..self }
    }
}

/// Elements for writing.
pub struct Out<'a> {
    device: &'a CudaDevice,
    at: DevicePtr,
    len: usize,
    dtype: Dtype,
    lifetime: PhantomData<&'a mut ()>,
}

impl<'a> Out<'a> {
    /// # Safety
    /// It is memory of `device` that the order of candle's stream lets the caller write, for `'a`.
    pub unsafe fn new(device: &'a CudaDevice, at: DevicePtr, len: usize, dtype: Dtype) -> Self {
        Out { device, at, len, dtype, lifetime: PhantomData }
    }

    pub fn device(&self) -> &'a CudaDevice {
        self.device
    }

    pub fn at(&self) -> DevicePtr {
        self.at
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }
}

/// New elements.
pub struct Buffer {
    storage: CudaStorage,
    at: DevicePtr,
    len: usize,
    dtype: Dtype,
}

impl Buffer {
    /// `len` elements that hold anything.
    pub fn new(device: &CudaDevice, dtype: Dtype, len: usize) -> Result<Self> {
        let (slice, at) = match dtype {
            Dtype::F32 => {
                let slice = scratch::<f32>(device, len)?;
                let at = address(device, &slice);
                (CudaStorageSlice::F32(slice), at)
            }
            Dtype::BF16 => {
                let slice = scratch::<bf16>(device, len)?;
                let at = address(device, &slice);
                (CudaStorageSlice::BF16(slice), at)
            }
            Dtype::F16 => {
                let slice = scratch::<f16>(device, len)?;
                let at = address(device, &slice);
                (CudaStorageSlice::F16(slice), at)
            }
        };
        Ok(Buffer { storage: CudaStorage { slice, device: device.clone() }, at, len, dtype })
    }

    pub fn view(&self) -> View<'_> {
        View { device: &self.storage.device, at: self.at, len: self.len, dtype: self.dtype }
    }

    pub fn out(&mut self) -> Out<'_> {
        self.out_part(0, self.len)
    }

    /// `len` of them from `start` on.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn out_part(&mut self, start: usize, len: usize) -> Out<'_> {
        assert!(start + len <= self.len, "{len} elements from {start} on, of {}", self.len);
        let at = self.at + (start * self.dtype.size()) as u64;
        Out { device: &self.storage.device, at, len, dtype: self.dtype, lifetime: PhantomData }
    }

    pub fn into_storage(self) -> CudaStorage {
        self.storage
    }

    /// A tensor of this shape; its elements are as many.
    pub fn into_tensor(self, shape: impl Into<Shape>) -> Tensor {
        Tensor::from_storage(Storage::Cuda(self.storage), shape, BackpropOp::none(), false)
    }
}

/// New memory for `len` elements, which hold anything.
pub fn scratch<T: DeviceRepr>(device: &CudaDevice, len: usize) -> Result<CudaSlice<T>> {
    // The driver has no empty allocations.
    // SAFETY: every bit pattern is a value of the types of numbers that this is called for.
    unsafe { device.alloc::<T>(len.max(1)) }
}

/// Where it begins.
pub fn address<T>(device: &CudaDevice, slice: &CudaSlice<T>) -> DevicePtr {
    slice.device_ptr(&device.cuda_stream()).0
}

/// Address, length and dtype of a contiguous tensor's elements.
fn locate(op: &str, storage: &CudaStorage, layout: &Layout) -> Result<(DevicePtr, usize, Dtype)> {
    fn whole<T>(slice: &CudaSlice<T>, stream: &CudaStream) -> (DevicePtr, usize) {
        (slice.device_ptr(stream).0, slice.len())
    }
    let stream = storage.device.cuda_stream();
    let ((at, available), dtype) = match &storage.slice {
        CudaStorageSlice::F32(slice) => (whole(slice, &stream), Dtype::F32),
        CudaStorageSlice::BF16(slice) => (whole(slice, &stream), Dtype::BF16),
        CudaStorageSlice::F16(slice) => (whole(slice, &stream), Dtype::F16),
        _ => {
            let dtype: DType = candle_core::backend::BackendStorage::dtype(storage);
            bail!("{op}: expected f32, bf16 or f16, got {}", dtype.as_str())
        }
    };
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!("{op}: expected a contiguous tensor, got {layout:?}");
    };
    if end > available {
        bail!("{op}: a layout of elements {start}..{end} over a storage of {available}");
    }
    Ok((at + (start * dtype.size()) as u64, end - start, dtype))
}

/// The ids, contiguous, on the device of `beside`, if that is a CUDA device. Copied from the CPU.
pub fn ids_beside(op: &str, ids: &Tensor, beside: &Tensor) -> Result<Option<Tensor>> {
    match beside.device() {
        device if ids.device().is_cpu() && is_captured(device) => {
            bail!("{op}: ids on the CPU, while a graph is captured: put them on the device before")
        }
        device @ Device::Cuda(_) => ids.to_device(device)?.contiguous().map(Some),
        _ => Ok(None),
    }
}

/// Address of the ids of a contiguous u32 tensor of `len` elements on a CUDA device.
pub fn ids_at(op: &str, ids: &Tensor, len: usize) -> Result<DevicePtr> {
    let (storage, layout) = ids.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { bail!("{op}: expected ids on a CUDA device") };
    let (CudaStorageSlice::U32(slice), Some((start, end))) = (&storage.slice, layout.contiguous_offsets())
    else {
        bail!("{op}: expected contiguous ids of dtype u32");
    };
    if end - start != len || end > slice.len() {
        bail!("{op}: ids {start}..{end} over a storage of {}, expected {len}", slice.len());
    }
    Ok(address(&storage.device, slice) + 4 * start as u64)
}
