//! Grids.

use crate::{Access, Dtype};

/// Threads of a block, in every kernel. Kernels are compiled for it: other sizes give wrong results.
pub const THREADS: u32 = 256;

/// Elements that a thread takes at a time, where addresses allow.
pub(crate) const PACK: u64 = 4;

/// An address in device memory (`CUdeviceptr`), 0 for none. It must suit the element type.
pub type DevicePtr = u64;

/// How a kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks in x and y; z is 1.
    pub grid: [u32; 2],
    /// Threads of a block in x: [`THREADS`].
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes: at most 48 KiB, which needs no attribute.
    pub shared_bytes: u32,
}

impl Launch {
    /// Blocks for `work` turns of a block, at most `max_blocks` of them; `None` without work.
    pub(crate) fn over(work: u64, max_blocks: u32) -> Option<Launch> {
        // At least one, whatever the limit.
        let blocks = work.min(max_blocks.max(1).into()) as u32;
        (work > 0).then_some(Launch { grid: [blocks, 1], threads: THREADS, shared_bytes: 0 })
    }

    /// Blocks for element-wise work on `len` elements.
    pub(crate) fn elements(len: u64, max_blocks: u32) -> Option<Launch> {
        Launch::over(len.div_ceil(u64::from(THREADS) * PACK), max_blocks)
    }

    /// One block.
    pub(crate) const ONE: Launch = Launch { grid: [1, 1], threads: THREADS, shared_bytes: 0 };
}

/// The arguments of a kernel: passed by value, as its only parameter.
///
/// # Safety
/// The type is `repr(C)` and has the fields of the struct of its name in [`SOURCE`](crate::SOURCE).
pub unsafe trait Args: Copy {
    /// The grid for these arguments, `None` if there is nothing to do (CUDA refuses empty grids).
    ///
    /// Any grid gives the same result. `max_blocks` bounds its x dimension: eight times the number of
    /// multiprocessors fills a device.
    fn launch(&self, max_blocks: u32) -> Option<Launch>;

    /// What a launch of a kernel for these dtypes may touch, in any order, null and empty ranges included. Better
    /// asked through [`Kernel::accesses`](crate::Kernel::accesses).
    fn accesses(&self, dtypes: [Dtype; 2]) -> Vec<Access>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_have_a_block_for_each_turn_up_to_the_limit() {
        assert_eq!(Launch::over(0, 8), None);
        assert_eq!(Launch::over(1, 0).unwrap().grid, [1, 1]);
        assert_eq!(Launch::over(7, 8).unwrap().grid, [7, 1]);
        assert_eq!(Launch::over(1 << 40, 8).unwrap().grid, [8, 1]);
        assert_eq!(Launch::elements(1024, 8).unwrap().grid, [1, 1]);
        assert_eq!(Launch::elements(1025, 8).unwrap().grid, [2, 1]);
    }
}
