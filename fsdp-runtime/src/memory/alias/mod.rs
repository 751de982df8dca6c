//! Parameters as aliases into flat buffers: the only place where the storage of a tensor is swapped.
//!
//! A parameter is one permanent tensor. While its unit is sharded its storage is a *tombstone*: a storage of a dtype that
//! candle computes nothing with, so that an op on a leaked handle answers with an error. While its unit is unsharded its
//! storage is an *alias*: a `Vec`, or on a device a `CudaSlice`, built over the parameter's part of the gathered buffer.
//!
//! # Safety invariant
//! An alias does not own its memory. It is made in [`Aliases::install`] and taken out and forgotten in the drop of the
//! same [`Aliases`], which holds the buffer alive in between; nothing else in the crate takes storage out of a parameter,
//! and candle never grows, shrinks or replaces an existing storage. So the alias is never dropped, never grown, and never
//! outlives its buffer. On a device, work that reads the alias may still be under way when it is taken out: the buffer
//! goes back to its pool with an event of the compute stream, or is freed in the order of that stream.
//!
//! One hole is candle's: `Tensor::inplace_op1` gives any safe in-place op `&mut` to the storage, so an op
//! that moves a parameter's storage out and drops it would free memory it does not own. No op of candle does;
//! do not write one.

#[cfg(feature = "cuda")]
mod cuda;
mod host;

use candle_core::backend::BackendDevice;
use candle_core::cpu_backend::CpuDevice;
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaStorage, DType, Device, InplaceOp1, Layout, MetalStorage, Shape, Storage, Tensor,
};
use parking_lot::Mutex;

use crate::device::Slice;
use crate::spec::Dtype;

/// Exchanges the storage under a tensor with the one in it, which is of the same device.
struct Swap(Mutex<Storage>);

impl InplaceOp1 for Swap {
    fn name(&self) -> &'static str {
        "swap-storage"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _layout: &Layout) -> candle_core::Result<()> {
        match &mut *self.0.lock() {
            Storage::Cpu(other) => std::mem::swap(storage, other),
            other => candle_core::bail!("storage of {:?} for a tensor on the CPU", other.device()),
        }
        Ok(())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _layout: &Layout) -> candle_core::Result<()> {
        match &mut *self.0.lock() {
            Storage::Cuda(other) => std::mem::swap(storage, other),
            other => candle_core::bail!("storage of {:?} for a tensor on a CUDA device", other.device()),
        }
        Ok(())
    }

    fn metal_fwd(&self, _storage: &mut MetalStorage, _layout: &Layout) -> candle_core::Result<()> {
        Err(unsupported())
    }
}

fn unsupported() -> candle_core::Error {
    candle_core::Error::Msg("parameters are on the CPU or, with the feature `cuda`, on a CUDA device".into())
}

/// The dtype that a parameter's storage has while it is sharded, as candle's errors name it.
pub(crate) const TOMBSTONE: DType = DType::F4;

/// Whether the words of an error name the dtype of tombstones.
pub(crate) fn names_tombstone(message: &str) -> bool {
    let mut words = message.split(|c: char| !c.is_ascii_alphanumeric());
    words.any(|word| word == format!("{TOMBSTONE:?}"))
}

/// A storage that candle computes nothing with.
fn tombstone(device: &Device) -> candle_core::Result<Storage> {
    match device {
        Device::Cpu => Ok(Storage::Cpu(host::tombstone())),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => Ok(Storage::Cuda(cuda::tombstone(device)?)),
        _ => Err(unsupported()),
    }
}

/// Puts `storage` under every handle of `tensor` and returns what was there; on failure, `storage` itself.
fn swap(tensor: &Tensor, storage: Storage) -> Result<Storage, Box<(candle_core::Error, Storage)>> {
    let op = Swap(Mutex::new(storage));
    match tensor.inplace_op1(&op) {
        Ok(()) => Ok(op.0.into_inner()),
        Err(error) => Err(Box::new((error, op.0.into_inner()))),
    }
}

/// A tensor without elements has nothing to swap, and is always the same: candle works in place on none of shape (3, 0),
/// for example, of whose strides one is 0.
fn is_empty(tensor: &Tensor) -> bool {
    // The product of the other dims may be more than can be counted.
    tensor.dims().contains(&0)
}

/// The permanent tensor of a parameter, resting on a tombstone; a variable of the autograd graph if
/// `trainable`.
pub(crate) fn variable(
    shape: &Shape,
    dtype: Dtype,
    trainable: bool,
    device: &Device,
) -> candle_core::Result<Tensor> {
    // The tensor keeps the dtype of the storage it was made with, whatever is swapped in.
    let empty = empty_storage(candle_dtype(dtype), device)?;
    let tensor = Tensor::from_storage(empty, shape.clone(), BackpropOp::none(), trainable);
    if is_empty(&tensor) {
        return Ok(tensor);
    }
    swap(&tensor, tombstone(device)?).map_err(|failed| failed.0)?;
    debug_assert_eq!(tensor.dtype(), candle_dtype(dtype));
    Ok(tensor)
}

/// The values of `tensor`, row-major, in storage of their own.
pub(crate) fn copy_out(tensor: &Tensor) -> candle_core::Result<Storage> {
    if is_empty(tensor) {
        return empty_storage(tensor.dtype(), tensor.device());
    }
    let copy = tensor.detach().force_contiguous()?;
    // Nobody else has a handle to the copy: its storage can be moved out.
    swap(&copy, tombstone(copy.device())?).map_err(|failed| failed.0)
}

/// What stands under a tensor that has no elements, or gets its storage later.
fn empty_storage(dtype: DType, device: &Device) -> candle_core::Result<Storage> {
    match device {
        Device::Cpu => Ok(Storage::Cpu(CpuDevice.zeros_impl(&Shape::from(0), dtype)?)),
        // One element: the driver is not asked for empty memory.
        Device::Cuda(device) => Ok(Storage::Cuda(device.zeros_impl(&Shape::from(1), dtype)?)),
        Device::Metal(_) => Err(unsupported()),
    }
}

/// candle's name for a dtype.
pub(crate) fn candle_dtype(dtype: Dtype) -> DType {
    match dtype {
        Dtype::F32 => DType::F32,
        Dtype::BF16 => DType::BF16,
        Dtype::F16 => DType::F16,
    }
}

/// Parameters that are aliases now. Dropping it puts the tombstones back.
#[derive(Debug, Default)]
pub(crate) struct Aliases {
    installed: Vec<Installed>,
}

#[derive(Debug)]
struct Installed {
    tensor: Tensor,
    slice: Slice,
    tombstone: Storage,
}

impl Aliases {
    /// Makes `tensor` an alias of `slice`, which must hold its elements, row-major, in its dtype.
    ///
    /// # Errors
    /// If the lengths, dtypes or devices differ.
    pub(crate) fn install(&mut self, tensor: &Tensor, slice: Slice) -> candle_core::Result<()> {
        if tensor.elem_count() != slice.len() || tensor.dtype() != candle_dtype(slice.dtype()) {
            candle_core::bail!(
                "a tensor of {} {:?} elements cannot alias a buffer of {} {} elements",
                tensor.elem_count(),
                tensor.dtype(),
                slice.len(),
                slice.dtype()
            );
        }
        if is_empty(tensor) {
            return Ok(());
        }
        match swap(tensor, alias(tensor.device(), &slice)?) {
            Ok(tombstone) => {
                self.installed.push(Installed { tensor: tensor.clone(), slice, tombstone });
                Ok(())
            }
            Err(failed) => {
                let (error, alias) = *failed;
                forget_alias(alias, &slice);
                Err(error)
            }
        }
    }
}

impl Drop for Aliases {
    fn drop(&mut self) {
        for Installed { tensor, slice, tombstone } in self.installed.drain(..) {
            match swap(&tensor, tombstone) {
                Ok(storage) => forget_alias(storage, &slice),
                // `inplace_op1` fails only on another device than the tensor's, where `install` would have failed
                // first; were it to happen, leaking the buffer keeps the alias sound.
                Err(_) => std::mem::forget((tensor, slice)),
            }
        }
    }
}

/// A storage over memory it does not own; see the module's invariant.
fn alias(device: &Device, slice: &Slice) -> candle_core::Result<Storage> {
    match device {
        Device::Cpu if slice.block().is_host() => Ok(Storage::Cpu(host::alias(slice))),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) if !slice.block().is_host() => Ok(Storage::Cuda(cuda::alias(device, slice))),
        Device::Metal(_) => Err(unsupported()),
        device => candle_core::bail!("a tensor on {device:?} cannot alias memory of another device"),
    }
}

/// Forgets the alias of `slice`; another storage (a tombstone, after a failed install) is owned by nobody else and is
/// dropped.
fn forget_alias(storage: Storage, slice: &Slice) {
    match storage {
        Storage::Cpu(storage) => host::forget(storage, slice),
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => cuda::forget(storage, slice),
        other => drop(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(values: &[f32]) -> Slice {
        // SAFETY: the tests use it in their own thread, once at a time.
        let slice = unsafe { Slice::zeros(Dtype::F32, values.len(), None) };
        // SAFETY: the buffer is new and ours alone.
        unsafe { slice.as_mut_slice::<f32>() }.copy_from_slice(values);
        slice
    }

    #[test]
    fn an_alias_reads_the_buffer_and_a_tombstone_errs() {
        let tensor = variable(&Shape::from((2, 2)), Dtype::F32, true, &Device::Cpu).unwrap();
        let clone = tensor.clone();
        assert!(tensor.sqr().is_err());
        let slice = filled(&[1.0, 2.0, 3.0, 4.0]);
        let mut aliases = Aliases::default();
        aliases.install(&tensor, slice.clone()).unwrap();
        assert_eq!(clone.to_vec2::<f32>().unwrap(), [[1.0, 2.0], [3.0, 4.0]]);
        drop(aliases);
        assert!(clone.sqr().is_err());
        // SAFETY: no alias is left.
        assert_eq!(unsafe { slice.as_slice::<f32>() }, [1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn views_and_detached_handles_follow_the_swap() {
        let tensor = variable(&Shape::from((2, 2)), Dtype::F32, true, &Device::Cpu).unwrap();
        let view = tensor.detach().t().unwrap();
        let mut aliases = Aliases::default();
        aliases.install(&tensor, filled(&[1.0, 2.0, 3.0, 4.0])).unwrap();
        assert_eq!(view.to_vec2::<f32>().unwrap(), [[1.0, 3.0], [2.0, 4.0]]);
        drop(aliases);
        assert!(view.matmul(&view).is_err());
    }

    #[test]
    fn a_wrong_length_or_dtype_is_refused() {
        let tensor = variable(&Shape::from(3), Dtype::F32, true, &Device::Cpu).unwrap();
        let mut aliases = Aliases::default();
        let error = aliases.install(&tensor, filled(&[1.0, 2.0])).unwrap_err();
        assert!(error.to_string().contains("3 F32 elements"), "{error}");
        // SAFETY: as in `buffer`.
        let half = unsafe { Slice::zeros(Dtype::BF16, 3, None) };
        assert!(aliases.install(&tensor, half).is_err());
    }

    #[test]
    fn a_parameter_without_elements_is_legal_in_any_shape() {
        for shape in [&[0][..], &[0, 4], &[3, 0], &[3, 0, 5], &[0, 0]] {
            let tensor = variable(&Shape::from(shape), Dtype::F32, true, &Device::Cpu).unwrap();
            let mut aliases = Aliases::default();
            aliases.install(&tensor, filled(&[])).unwrap();
            assert_eq!(tensor.sum_all().unwrap().to_scalar::<f32>().unwrap(), 0.0);
            drop(aliases);
            assert_eq!((tensor.dims(), tensor.dtype()), (shape, DType::F32));
            let Storage::Cpu(CpuStorage::F32(values)) = copy_out(&tensor).unwrap() else {
                panic!("another dtype")
            };
            assert!(values.is_empty());
        }
    }
}
