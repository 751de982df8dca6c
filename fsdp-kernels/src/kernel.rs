//! Kernels by name, as a driver that runs them as functions needs them.

use std::ffi::c_void;

use crate::access::merged;
use crate::{Access, Args, Dtype, FAMILIES, Family};

/// What reads the accesses from arguments known by address.
pub(crate) type AccessesOf = unsafe fn(*const c_void, [Dtype; 2]) -> Vec<Access>;

/// # Safety
/// `args` points to an `A`, at any alignment.
pub(crate) unsafe fn accesses_of<A: Args>(args: *const c_void, dtypes: [Dtype; 2]) -> Vec<Access> {
    // SAFETY: the caller's promise.
    unsafe { args.cast::<A>().read_unaligned() }.accesses(dtypes)
}

/// A kernel of [`FAMILIES`].
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    name: &'static str,
    family: &'static Family,
}

impl Kernel {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Kernel> {
        FAMILIES.iter().flat_map(|family| family.kernels.iter().map(move |&name| Kernel { name, family }))
    }

    /// The kernel of this name.
    pub fn find(name: &str) -> Option<Kernel> {
        Kernel::all().find(|kernel| kernel.name == name)
    }

    /// Its name in [`SOURCE`](crate::SOURCE).
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Bytes of its only parameter.
    pub fn args_size(&self) -> usize {
        self.family.args_size
    }

    /// The dtypes in its name; what a kernel of one or none does not have is f32.
    pub fn dtypes(&self) -> [Dtype; 2] {
        let mut named = self.name.split('_').filter_map(|part| match part {
            "f32" => Some(Dtype::F32),
            "bf16" => Some(Dtype::BF16),
            "f16" => Some(Dtype::F16),
            _ => None,
        });
        std::array::from_fn(|_| named.next().unwrap_or(Dtype::F32))
    }

    /// What a launch with these arguments may touch: ranges that do not overlap, in ascending order.
    ///
    /// They depend on the arguments only, not on what is in device memory: they are known when a launch is submitted.
    /// Rows that are not contiguous count with what is between them.
    ///
    /// # Safety
    /// `args` points to the struct that the kernel takes, at any alignment.
    pub unsafe fn accesses(&self, args: *const c_void) -> Vec<Access> {
        // SAFETY: the caller's promise; the function is that of the kernel's struct.
        merged(unsafe { (self.family.accesses)(args, self.dtypes()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CastArgs, cast, sum_f64, sum_ranks};

    #[test]
    fn dtypes_are_those_of_the_name() {
        for from in Dtype::ALL {
            for to in Dtype::ALL {
                assert_eq!(Kernel::find(cast(from, to)).unwrap().dtypes(), [from, to]);
            }
        }
        let kernel = Kernel::find(sum_ranks(Dtype::BF16, Dtype::F32).unwrap()).unwrap();
        assert_eq!(kernel.dtypes(), [Dtype::BF16, Dtype::F32]);
        assert_eq!(Kernel::find(sum_f64()).unwrap().dtypes(), [Dtype::F32, Dtype::F32]);
        assert!(Kernel::find("fsdp_cast").is_none());
    }

    #[test]
    fn accesses_come_from_arguments_at_any_address() {
        let args = CastArgs { from: 0x1000, to: 0x2000, len: 3 };
        let mut bytes = [0u8; 1 + size_of::<CastArgs>()];
        for (to, from) in bytes[1..].chunks_exact_mut(8).zip([args.from, args.to, args.len]) {
            to.copy_from_slice(&from.to_ne_bytes());
        }
        let kernel = Kernel::find(cast(Dtype::BF16, Dtype::F32)).unwrap();
        assert_eq!(kernel.args_size(), size_of::<CastArgs>());
        // SAFETY: the bytes are those of the arguments.
        let accesses = unsafe { kernel.accesses(bytes[1..].as_ptr().cast()) };
        let expected = [
            Access { begin: 0x1000, bytes: 6, writes: false },
            Access { begin: 0x2000, bytes: 12, writes: true },
        ];
        assert_eq!(accesses, expected);
    }
}
