//! Tensors that have a parameter's values for a while: the only place where the storage of a tensor is swapped.
//!
//! A parameter is one permanent tensor, whatever handles to it a program has. While its unit is sharded its storage is a
//! *tombstone*: a storage of a dtype that candle computes nothing with, so that an op on a kept handle answers with an
//! error. While its unit is unsharded its storage is the parameter's part of the gathered buffer: on the host that very
//! memory, moved into the tensor as the `Vec` it was allocated as; on a device a `CudaSlice` over it.
//!
//! # Safety invariant
//! Safe code can reach a tensor's storage, read and written, by in-place ops and by guards of its lock, at any time and from
//! any thread. On the host it finds nothing there that is shared: [`Slice::lend`] gives a piece of the buffer away, as a `Vec`
//! of the global allocator, and until [`Slice::take_back`] the piece has no address. What is taken back is looked at: another
//! `Vec`, or the same with other values, is an error of the engine, but no danger. If the storage cannot be swapped,
//! because a guard of it is alive, the memory stays the tensor's.
//!
//! On a device an alias does not own its memory. It is made in [`Aliases::install`] and taken out and forgotten in
//! [`Aliases::take_back`] of the same [`Aliases`], which holds the buffer in between. Work that reads the alias may still be
//! under way then: the buffer goes back to its pool with an event of the compute stream, or is freed in the order of that
//! stream. Code that takes the alias out of the tensor and drops it asks the driver to free an address inside of a block, which
//! the driver refuses.

mod cuda;
mod digest;
mod host;

use std::ptr::NonNull;
use std::time::Duration;

use candle_core::backend::BackendDevice;
use candle_core::cpu_backend::CpuDevice;
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Shape, Storage, Tensor};
use parking_lot::{RwLock, RwLockReadGuard};

use self::digest::Digest;
pub(crate) use self::digest::Thoroughness;
use crate::device::Slice;
use crate::spec::Dtype;

/// How long a guard of a parameter's storage is waited for. Whoever reads a tensor is done with it sooner.
const GUARD_WAIT: Duration = Duration::from_millis(if cfg!(test) { 10 } else { 5000 });

/// The lock around the storage of all handles to `tensor`.
fn lock_of(tensor: &Tensor) -> &RwLock<Storage> {
    let (guard, _) = tensor.storage_and_layout();
    RwLockReadGuard::rwlock(&guard)
}

/// Whether one is a handle to the memory of the other, or a view of it.
pub(crate) fn share_storage(one: &Tensor, other: &Tensor) -> bool {
    std::ptr::eq(lock_of(one), lock_of(other))
}

/// The permanent tensor of a parameter, a variable of the autograd graph if it is trainable.
#[derive(Clone, Debug)]
pub(crate) struct Variable {
    tensor: Tensor,
    /// That of `tensor`, which keeps it alive: to ask the tensor for it may mean to wait.
    lock: NonNull<RwLock<Storage>>,
}

// SAFETY: the pointer is to a `RwLock<Storage>`, as much `Send` and `Sync` as the tensor beside it that shares it.
unsafe impl Send for Variable {}
// SAFETY: as above.
unsafe impl Sync for Variable {}

impl Variable {
    /// A parameter's tensor, resting on a tombstone.
    ///
    /// # Errors
    /// Those of the device.
    pub(crate) fn new(
        shape: &Shape,
        dtype: Dtype,
        trainable: bool,
        device: &Device,
    ) -> candle_core::Result<Variable> {
        // The tensor keeps the dtype of the storage it was made with, whatever is swapped in.
        let empty = empty_storage(candle_dtype(dtype), device)?;
        let tensor = Tensor::from_storage(empty, shape.clone(), BackpropOp::none(), trainable);
        if !is_empty(&tensor) {
            *lock_of(&tensor).write() = tombstone(device)?;
        }
        debug_assert_eq!(tensor.dtype(), candle_dtype(dtype));
        let lock = NonNull::from(lock_of(&tensor));
        Ok(Variable { tensor, lock })
    }

    pub(crate) fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Puts `storage` under every handle and returns what was there, or `storage` itself if a guard of what is there is alive
    /// after `wait`.
    fn swap(&self, storage: Storage, wait: Duration) -> Result<Storage, Box<Storage>> {
        // SAFETY: `tensor` holds what the lock is in.
        let lock = unsafe { self.lock.as_ref() };
        match lock.try_write_for(wait) {
            Some(mut present) => Ok(std::mem::replace(&mut *present, storage)),
            None => Err(Box::new(storage)),
        }
    }
}

/// A tensor without elements has nothing to swap, and is always the same.
fn is_empty(tensor: &Tensor) -> bool {
    // The product of the other dims may be more than can be counted.
    tensor.dims().contains(&0)
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
        Device::Cuda(device) => Ok(Storage::Cuda(cuda::tombstone(device)?)),
        _ => Err(unsupported()),
    }
}

/// The values of `tensor`, row-major, in storage of their own.
pub(crate) fn copy_out(tensor: &Tensor) -> candle_core::Result<Storage> {
    if is_empty(tensor) {
        return empty_storage(tensor.dtype(), tensor.device());
    }
    let copy = tensor.detach().force_contiguous()?;
    let tombstone = tombstone(copy.device())?;
    // Nobody else has a handle to the copy: its storage can be moved out.
    let mut storage = lock_of(&copy).write();
    Ok(std::mem::replace(&mut *storage, tombstone))
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

/// Why a parameter's tensor does not get or give back its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A guard of its storage is alive: the storage stays what it is.
    Guarded,
    /// What came back is not the memory that was lent: a program has taken it, or made it longer or shorter.
    Replaced,
    /// It came back with other values: a program has written to it.
    Written,
}

/// Parameters whose tensors have their values now. Dropping it puts the tombstones back.
#[derive(Debug, Default)]
pub(crate) struct Aliases {
    installed: Vec<Installed>,
}

#[derive(Debug)]
struct Installed {
    param: usize,
    variable: Variable,
    slice: Slice,
    tombstone: Storage,
    digest: Digest,
}

impl Aliases {
    /// Gives the tensor of `param` the memory of `slice`, which must hold its elements, row-major, in its dtype. On the host it
    /// must be a piece of its buffer, which nothing that is under way uses.
    ///
    /// # Errors
    /// [`Fault::Guarded`]. The parameter is as before.
    ///
    /// # Panics
    /// If the memory is not what is asked for.
    pub(crate) fn install(
        &mut self,
        param: usize,
        variable: &Variable,
        slice: Slice,
        how: Thoroughness,
    ) -> Result<(), Fault> {
        let tensor = &variable.tensor;
        if is_empty(tensor) && slice.is_empty() {
            return Ok(());
        }
        let fits = tensor.elem_count() == slice.len() && tensor.dtype() == candle_dtype(slice.dtype());
        assert!(
            fits,
            "a tensor of {} {:?} elements cannot have the memory of {} {} elements",
            tensor.elem_count(),
            tensor.dtype(),
            slice.len(),
            slice.dtype()
        );
        let digest = Digest::of(&slice, how);
        match variable.swap(lend(tensor.device(), &slice), GUARD_WAIT) {
            Ok(tombstone) => {
                let variable = variable.clone();
                self.installed.push(Installed { param, variable, slice, tombstone, digest });
                Ok(())
            }
            Err(lent) => {
                take_back(*lent, &slice);
                Err(Fault::Guarded)
            }
        }
    }

    /// Whether no tensor has any memory.
    pub(crate) fn is_empty(&self) -> bool {
        self.installed.is_empty()
    }

    /// Puts the tombstones back, and looks at what the tensors had. Those whose storage is guarded keep it: only these are left.
    ///
    /// # Errors
    /// The parameters that have one, with their faults.
    pub(crate) fn take_back(&mut self) -> Result<(), Vec<(usize, Fault)>> {
        let (mut wait, mut faults) = (GUARD_WAIT, Vec::new());
        for installed in std::mem::take(&mut self.installed) {
            let Installed { param, variable, slice, tombstone, digest } = installed;
            match variable.swap(tombstone, wait) {
                Ok(storage) => {
                    if !take_back(storage, &slice) {
                        faults.push((param, Fault::Replaced));
                    } else if digest != digest.again(&slice) {
                        faults.push((param, Fault::Written));
                    }
                }
                Err(tombstone) => {
                    faults.push((param, Fault::Guarded));
                    self.installed.push(Installed { param, variable, slice, tombstone: *tombstone, digest });
                    // The rank waits once.
                    wait = Duration::ZERO;
                }
            }
        }
        if faults.is_empty() { Ok(()) } else { Err(faults) }
    }
}

impl Drop for Aliases {
    fn drop(&mut self) {
        // Values do not count any more.
        let _ = self.take_back();
        // On the host what is left is the tensor's; on a device, memory under a storage in use must stay.
        let on_device = self.installed.drain(..).filter(|installed| !installed.slice.is_host());
        on_device.for_each(|installed| std::mem::forget(installed.slice));
    }
}

/// A storage that is, or on a device is over, the memory of `slice`; see the module's invariant.
fn lend(device: &Device, slice: &Slice) -> Storage {
    match device {
        Device::Cpu => Storage::Cpu(host::lend(slice)),
        Device::Cuda(device) if !slice.is_host() => Storage::Cuda(cuda::alias(device, slice)),
        device => panic!("a tensor on {device:?} cannot have memory of another device"),
    }
}

/// Takes back what was [lent](lend): whether it is what it was. Another storage is owned by nobody else, and is dropped.
fn take_back(storage: Storage, slice: &Slice) -> bool {
    match storage {
        Storage::Cpu(storage) if slice.is_host() => host::take_back(storage, slice),
        Storage::Cuda(storage) if !slice.is_host() => cuda::forget(storage, slice),
        _ if slice.is_host() => host::take_back(host::tombstone(), slice),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{CpuStorage, InplaceOp1, Layout, Var};

    use super::*;

    fn filled(values: &[f32]) -> Slice {
        // SAFETY: the buffer is new and this test's alone.
        unsafe {
            let slice = Slice::zeros_in_pieces(
                &crate::device::HostMemory,
                Dtype::F32,
                values.len(),
                std::slice::from_ref(&(0..values.len())),
                None,
            );
            let slice = slice.unwrap();
            slice.as_mut_slice::<f32>().copy_from_slice(values);
            slice
        }
    }

    fn variable(shape: impl Into<Shape>) -> Variable {
        Variable::new(&shape.into(), Dtype::F32, true, &Device::Cpu).unwrap()
    }

    fn install(variable: &Variable, slice: &Slice, how: Thoroughness) -> Aliases {
        let mut aliases = Aliases::default();
        aliases.install(7, variable, slice.clone(), how).unwrap();
        aliases
    }

    #[test]
    fn a_tensor_has_the_buffer_and_a_tombstone_errs() {
        let variable = variable((2, 2));
        let clone = variable.tensor().clone();
        assert!(clone.sqr().is_err());
        let slice = filled(&[1.0, 2.0, 3.0, 4.0]);
        let mut aliases = install(&variable, &slice, Thoroughness::All);
        assert_eq!(clone.to_vec2::<f32>().unwrap(), [[1.0, 2.0], [3.0, 4.0]]);
        assert_eq!(aliases.take_back(), Ok(()));
        assert!(clone.sqr().is_err());
        // SAFETY: no tensor has it.
        assert_eq!(unsafe { slice.as_slice::<f32>() }, [1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn views_and_detached_handles_follow_the_swap() {
        let variable = variable((2, 2));
        let view = variable.tensor().detach().t().unwrap();
        let aliases = install(&variable, &filled(&[1.0, 2.0, 3.0, 4.0]), Thoroughness::All);
        assert_eq!(view.to_vec2::<f32>().unwrap(), [[1.0, 3.0], [2.0, 4.0]]);
        drop(aliases);
        assert!(view.matmul(&view).is_err());
    }

    #[test]
    #[should_panic(expected = "a tensor of 3 F32 elements cannot have the memory of 2")]
    fn a_wrong_length_is_refused() {
        install(&variable(3), &filled(&[1.0, 2.0]), Thoroughness::All);
    }

    /// Does to the `Vec` of a tensor what a safe op may do.
    struct Reach(fn(&mut Vec<f32>));

    impl InplaceOp1 for Reach {
        fn name(&self) -> &'static str {
            "reach"
        }

        fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
            let CpuStorage::F32(vec) = storage else { candle_core::bail!("another dtype") };
            self.0(vec);
            Ok(())
        }
    }

    #[test]
    fn what_a_safe_op_does_to_the_memory_is_found_and_harmless() {
        type Op = fn(&mut Vec<f32>);
        let ops: [(Op, Fault); 5] = [
            (|vec| vec.push(1.0), Fault::Replaced),
            (|vec| vec.extend(vec![1.0; 1000]), Fault::Replaced),
            (|vec| drop(std::mem::take(vec)), Fault::Replaced),
            (|vec| vec.truncate(1), Fault::Replaced),
            (|vec| vec[2] = 9.0, Fault::Written),
        ];
        for (index, (op, fault)) in ops.into_iter().enumerate() {
            let (variable, slice) = (variable(4), filled(&[1.0, 2.0, 3.0, 4.0]));
            for how in [Thoroughness::All, Thoroughness::Sample(1)] {
                let mut aliases = install(&variable, &slice, how);
                variable.tensor().inplace_op1(&Reach(op)).unwrap();
                let found = aliases.take_back();
                assert_eq!(found, Err(vec![(7, fault)]), "op {index}, {how:?}");
                assert!(aliases.is_empty());
                // SAFETY: no tensor has it.
                unsafe { slice.as_mut_slice::<f32>() }.fill(1.0);
            }
        }
    }

    #[test]
    fn memory_may_change_hands_between_tensors() {
        // The `Vec` of one parameter ends up in another: both are found, each is freed once.
        struct Exchange(parking_lot::Mutex<Vec<f32>>);
        impl InplaceOp1 for Exchange {
            fn name(&self) -> &'static str {
                "exchange"
            }
            fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
                let CpuStorage::F32(vec) = storage else { candle_core::bail!("another dtype") };
                std::mem::swap(vec, &mut self.0.lock());
                Ok(())
            }
        }
        let (a, b) = (variable(2), variable(2));
        let mut aliases = Aliases::default();
        aliases.install(0, &a, filled(&[1.0, 2.0]), Thoroughness::All).unwrap();
        aliases.install(1, &b, filled(&[3.0, 4.0]), Thoroughness::All).unwrap();
        let exchange = Exchange(parking_lot::Mutex::default());
        for variable in [&a, &b, &a] {
            variable.tensor().inplace_op1(&exchange).unwrap();
        }
        assert_eq!(aliases.take_back(), Err(vec![(0, Fault::Replaced), (1, Fault::Replaced)]));
    }

    #[test]
    fn a_guarded_storage_stays_the_tensors_until_the_guard_is_gone() {
        let (variable, slice) = (variable(2), filled(&[1.0, 2.0]));
        let mut aliases = install(&variable, &slice, Thoroughness::All);
        let kept = variable.tensor().clone();
        let (guard, _) = kept.storage_and_layout();
        assert_eq!(aliases.take_back(), Err(vec![(7, Fault::Guarded)]));
        assert!(!aliases.is_empty());
        let Storage::Cpu(CpuStorage::F32(values)) = &*guard else { panic!("another storage") };
        assert_eq!(values, &[1.0, 2.0]);
        drop(guard);
        assert_eq!(aliases.take_back(), Ok(()));
        let (guard, _) = kept.storage_and_layout();
        assert_eq!(
            Aliases::default().install(7, &variable, slice.clone(), Thoroughness::All),
            Err(Fault::Guarded)
        );
        drop(guard);
        install(&variable, &slice, Thoroughness::All);
    }

    #[test]
    fn a_parameter_without_elements_is_legal_in_any_shape() {
        for shape in [&[0][..], &[0, 4], &[3, 0], &[3, 0, 5], &[0, 0]] {
            let variable = variable(shape);
            let tensor = variable.tensor();
            let aliases = install(&variable, &filled(&[]), Thoroughness::All);
            assert_eq!(tensor.sum_all().unwrap().to_scalar::<f32>().unwrap(), 0.0);
            drop(aliases);
            assert_eq!((tensor.dims(), tensor.dtype()), (shape, DType::F32));
            let Storage::Cpu(CpuStorage::F32(values)) = copy_out(tensor).unwrap() else {
                panic!("another dtype")
            };
            assert!(values.is_empty());
        }
    }

    #[test]
    fn setting_a_variable_is_found_as_well() {
        let (variable, slice) = (variable(2), filled(&[1.0, 2.0]));
        let mut aliases = install(&variable, &slice, Thoroughness::All);
        Var::from_tensor(variable.tensor())
            .unwrap()
            .set(&Tensor::new(&[1f32, 5.0], &Device::Cpu).unwrap())
            .unwrap();
        assert_eq!(aliases.take_back(), Err(vec![(7, Fault::Written)]));
    }
}
