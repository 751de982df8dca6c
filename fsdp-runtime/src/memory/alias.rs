//! Parameters as aliases into flat buffers: the only place where the storage of a tensor is swapped.
//!
//! A parameter is one permanent tensor. While its unit is sharded its storage is a *tombstone*: an empty
//! storage of a dtype that candle computes nothing with, so that an op on a leaked handle answers with an
//! error. While its unit is unsharded its storage is an *alias*: a `Vec` built over the parameter's part of
//! the gathered buffer.
//!
//! # Safety invariant
//! An alias `Vec` does not own its memory. It is made in [`Aliases::install`] and taken out and forgotten in
//! the drop of the same [`Aliases`], which holds the buffer alive in between; nothing else in the crate takes
//! storage out of a parameter, and candle never grows, shrinks or replaces the `Vec` of an existing storage.
//! So the alias is never dropped, never grown, and never outlives its buffer.
//!
//! One hole is candle's: `Tensor::inplace_op1` gives any safe in-place op `&mut` to the storage, so an op
//! that moves a parameter's storage out and drops it would free memory it does not own. No op of candle does;
//! do not write one.

use candle_core::backend::BackendDevice;
use candle_core::cpu_backend::CpuDevice;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Shape, Storage, Tensor};
use half::{bf16, f16};
use parking_lot::Mutex;

use crate::device::{Element, Slice};
use crate::spec::Dtype;

struct Swap(Mutex<CpuStorage>);

impl InplaceOp1 for Swap {
    fn name(&self) -> &'static str {
        "swap-storage"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _layout: &Layout) -> candle_core::Result<()> {
        std::mem::swap(storage, &mut self.0.lock());
        Ok(())
    }
}

fn tombstone() -> CpuStorage {
    CpuStorage::F4(Vec::new())
}

/// Puts `storage` under every handle of `tensor` and returns what was there; on failure, `storage` itself.
fn swap(tensor: &Tensor, storage: CpuStorage) -> Result<CpuStorage, (candle_core::Error, CpuStorage)> {
    let op = Swap(Mutex::new(storage));
    match tensor.inplace_op1(&op) {
        Ok(()) => Ok(op.0.into_inner()),
        Err(error) => Err((error, op.0.into_inner())),
    }
}

/// A tensor without elements has nothing to swap, and is always the same: candle works in place on none of shape (3, 0),
/// for example, of whose strides one is 0.
fn is_empty(tensor: &Tensor) -> bool {
    tensor.elem_count() == 0
}

/// The permanent tensor of a parameter, resting on a tombstone; a variable of the autograd graph if
/// `trainable`.
pub(crate) fn variable(shape: &Shape, dtype: Dtype, trainable: bool) -> candle_core::Result<Tensor> {
    let empty = match dtype {
        Dtype::F32 => CpuStorage::F32(Vec::new()),
        Dtype::BF16 => CpuStorage::BF16(Vec::new()),
        Dtype::F16 => CpuStorage::F16(Vec::new()),
    };
    let tensor = Tensor::from_storage(Storage::Cpu(empty), shape.clone(), BackpropOp::none(), trainable);
    if is_empty(&tensor) {
        return Ok(tensor);
    }
    // The tensor keeps the dtype of the storage it was made with, whatever is swapped in.
    swap(&tensor, tombstone()).map_err(|(error, _)| error)?;
    debug_assert!(matches!(tensor.device(), Device::Cpu));
    debug_assert_eq!(tensor.dtype(), candle_dtype(dtype));
    Ok(tensor)
}

/// The values of `tensor`, row-major, in storage of their own.
pub(crate) fn copy_out(tensor: &Tensor) -> candle_core::Result<CpuStorage> {
    if is_empty(tensor) {
        return CpuDevice.zeros_impl(&Shape::from(0), tensor.dtype());
    }
    let copy = tensor.detach().force_contiguous()?;
    // Nobody else has a handle to the copy: its storage can be moved out.
    swap(&copy, tombstone()).map_err(|(error, _)| error)
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
    installed: Vec<(Tensor, Slice)>,
}

impl Aliases {
    /// Makes `tensor` an alias of `slice`, which must hold its elements, row-major, in its dtype.
    ///
    /// # Errors
    /// If the lengths or dtypes differ.
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
        let alias = match slice.dtype() {
            Dtype::F32 => CpuStorage::F32(alias_vec::<f32>(&slice)),
            Dtype::BF16 => CpuStorage::BF16(alias_vec::<bf16>(&slice)),
            Dtype::F16 => CpuStorage::F16(alias_vec::<f16>(&slice)),
        };
        match swap(tensor, alias) {
            Ok(_tombstone) => {
                self.installed.push((tensor.clone(), slice));
                Ok(())
            }
            Err((error, alias)) => {
                forget_alias(alias, &slice);
                Err(error)
            }
        }
    }
}

impl Drop for Aliases {
    fn drop(&mut self) {
        for (tensor, slice) in self.installed.drain(..) {
            match swap(&tensor, tombstone()) {
                Ok(storage) => forget_alias(storage, &slice),
                // `inplace_op1` fails only on another device than the CPU, where `install` would have failed
                // first; were it to happen, leaking the buffer keeps the alias sound.
                Err(_) => std::mem::forget((tensor, slice)),
            }
        }
    }
}

/// A `Vec` over memory it does not own; see the module's invariant.
fn alias_vec<T: Element>(slice: &Slice) -> Vec<T> {
    // SAFETY: pointer, length and alignment are those of a live part of the buffer, whose elements are
    // initialised. The allocator never sees this pointer: the `Vec` goes straight into a storage from which
    // only `Aliases::drop` takes it, to forget it, and candle neither grows nor frees a storage that is
    // reachable from a live tensor.
    unsafe { Vec::from_raw_parts(slice.as_ptr().cast::<T>(), slice.len(), slice.len()) }
}

fn forget_alias(storage: CpuStorage, slice: &Slice) {
    let address = slice.as_ptr();
    match storage {
        CpuStorage::F32(vec) if vec.as_ptr().cast() == address.cast_const() => std::mem::forget(vec),
        CpuStorage::BF16(vec) if vec.as_ptr().cast() == address.cast_const() => std::mem::forget(vec),
        CpuStorage::F16(vec) if vec.as_ptr().cast() == address.cast_const() => std::mem::forget(vec),
        // A tombstone (the install failed): owned by nobody else.
        other => drop(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(values: &[f32]) -> Slice {
        let slice = Slice::zeros(Dtype::F32, values.len(), None);
        // SAFETY: the buffer is new and ours alone.
        unsafe { slice.as_mut_slice::<f32>() }.copy_from_slice(values);
        slice
    }

    #[test]
    fn an_alias_reads_the_buffer_and_a_tombstone_errs() {
        let tensor = variable(&Shape::from((2, 2)), Dtype::F32, true).unwrap();
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
        let tensor = variable(&Shape::from((2, 2)), Dtype::F32, true).unwrap();
        let view = tensor.detach().t().unwrap();
        let mut aliases = Aliases::default();
        aliases.install(&tensor, filled(&[1.0, 2.0, 3.0, 4.0])).unwrap();
        assert_eq!(view.to_vec2::<f32>().unwrap(), [[1.0, 3.0], [2.0, 4.0]]);
        drop(aliases);
        assert!(view.matmul(&view).is_err());
    }

    #[test]
    fn a_wrong_length_or_dtype_is_refused() {
        let tensor = variable(&Shape::from(3), Dtype::F32, true).unwrap();
        let mut aliases = Aliases::default();
        let error = aliases.install(&tensor, filled(&[1.0, 2.0])).unwrap_err();
        assert!(error.to_string().contains("3 F32 elements"), "{error}");
        let half = Slice::zeros(Dtype::BF16, 3, None);
        assert!(aliases.install(&tensor, half).is_err());
    }

    #[test]
    fn a_parameter_without_elements_is_legal_in_any_shape() {
        for shape in [&[0][..], &[0, 4], &[3, 0], &[3, 0, 5], &[0, 0]] {
            let tensor = variable(&Shape::from(shape), Dtype::F32, true).unwrap();
            let mut aliases = Aliases::default();
            aliases.install(&tensor, filled(&[])).unwrap();
            assert_eq!(tensor.sum_all().unwrap().to_scalar::<f32>().unwrap(), 0.0);
            drop(aliases);
            assert_eq!((tensor.dims(), tensor.dtype()), (shape, DType::F32));
            let CpuStorage::F32(values) = copy_out(&tensor).unwrap() else { panic!("another dtype") };
            assert!(values.is_empty());
        }
    }
}
