//! Element-wise kernels on flat buffers: sums, casts, fills.

use crate::dtype::{by_dtype, by_dtypes, pick, pick_two};
use crate::{Access, Args, DevicePtr, Dtype, Launch};

pub(crate) const ACCUMULATE: &[&str] = by_dtypes!("accumulate");
pub(crate) const CAST: &[&str] = by_dtypes!("cast");
pub(crate) const FILL: &[&str] = by_dtype!("fill");
pub(crate) const SUM_RANKS: &[&str] = &[
    "fsdp_sum_ranks_f32_f32",
    "fsdp_sum_ranks_bf16_f32",
    "fsdp_sum_ranks_bf16_bf16",
    "fsdp_sum_ranks_f16_f32",
    "fsdp_sum_ranks_f16_f16",
];

/// The scaled sum of `values` into a buffer `acc`, of these dtypes; takes [`AccumulateArgs`].
pub fn accumulate(values: Dtype, acc: Dtype) -> &'static str {
    pick_two(ACCUMULATE, values, acc)
}

/// `acc = acc * beta + scale * values`, in f32, rounded to the dtype of `acc`.
///
/// What has factor 0 is not read: with `beta` 0 it does not matter what `acc` holds, with `scale` 0 (a scaling of
/// `acc`) `values` may be 0.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AccumulateArgs {
    /// Read and written.
    pub acc: DevicePtr,
    /// What is added.
    pub values: DevicePtr,
    /// Elements of both.
    pub len: u64,
    /// Factor of what was there.
    pub beta: f32,
    /// Factor of what is added.
    pub scale: f32,
}

// SAFETY: repr(C), the fields of `AccumulateArgs` in accumulate.cuh.
unsafe impl Args for AccumulateArgs {
    fn launch(&self, max_blocks: u32) -> Option<Launch> {
        Launch::elements(self.len, max_blocks)
    }

    fn accesses(&self, [values, acc]: [Dtype; 2]) -> Vec<Access> {
        let read = if self.scale == 0.0 { 0 } else { self.len };
        vec![Access::write(self.acc, self.len, acc.size()), Access::read(self.values, read, values.size())]
    }
}

/// A cast between these dtypes, or a copy; takes [`CastArgs`].
pub fn cast(from: Dtype, to: Dtype) -> &'static str {
    pick_two(CAST, from, to)
}

/// `to = from`, rounded to nearest even; a NaN stays one, without its payload.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CastArgs {
    /// Read.
    pub from: DevicePtr,
    /// Written; `from` itself only if the dtypes are of one size.
    pub to: DevicePtr,
    /// Elements of both.
    pub len: u64,
}

// SAFETY: repr(C), the fields of `CastArgs` in cast.cuh.
unsafe impl Args for CastArgs {
    fn launch(&self, max_blocks: u32) -> Option<Launch> {
        Launch::elements(self.len, max_blocks)
    }

    fn accesses(&self, [from, to]: [Dtype; 2]) -> Vec<Access> {
        vec![Access::read(self.from, self.len, from.size()), Access::write(self.to, self.len, to.size())]
    }
}

/// A fill of a buffer of this dtype; takes [`FillArgs`].
pub fn fill(dtype: Dtype) -> &'static str {
    pick(FILL, dtype)
}

/// Every element becomes `value`, rounded: 0, or NaN to poison what should not be read.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FillArgs {
    /// Written.
    pub to: DevicePtr,
    /// Elements.
    pub len: u64,
    /// What they become.
    pub value: f32,
}

// SAFETY: repr(C), the fields of `FillArgs` in cast.cuh.
unsafe impl Args for FillArgs {
    fn launch(&self, max_blocks: u32) -> Option<Launch> {
        Launch::elements(self.len, max_blocks)
    }

    fn accesses(&self, [dtype, _]: [Dtype; 2]) -> Vec<Access> {
        vec![Access::write(self.to, self.len, dtype.size())]
    }
}

/// Buffers that [`SumRanksArgs`] can add up.
pub const MAX_RANKS: usize = 64;

/// The sum of buffers of ranks on one device, for `sources` and `out` of these dtypes; takes [`SumRanksArgs`].
///
/// `None` unless `out` is f32 or has the dtype of the sources.
pub fn sum_ranks(sources: Dtype, out: Dtype) -> Option<&'static str> {
    let index = match (sources, out) {
        (Dtype::F32, Dtype::F32) => 0,
        (Dtype::BF16, Dtype::F32) => 1,
        (Dtype::BF16, Dtype::BF16) => 2,
        (Dtype::F16, Dtype::F32) => 3,
        (Dtype::F16, Dtype::F16) => 4,
        _ => return None,
    };
    Some(SUM_RANKS[index])
}

/// `out (+)= scale * (sources[0] + sources[1] + ..)`, summed in this order in f32, rounded once.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SumRanksArgs {
    /// The ranks' buffers, in rank order; the first `count` are used, at least one.
    pub sources: [DevicePtr; MAX_RANKS],
    /// Written: one of the sources, or overlapping none.
    pub out: DevicePtr,
    /// Elements of each.
    pub len: u64,
    /// Number of ranks.
    pub count: u32,
    /// 1 to add to what `out` holds, 0 to overwrite it.
    pub add: u32,
    /// Factor of the sum.
    pub scale: f32,
}

impl SumRanksArgs {
    /// The arguments for the buffers `sources`, in rank order.
    ///
    /// # Panics
    /// If there are none, or more than [`MAX_RANKS`].
    pub fn new(sources: &[DevicePtr], out: DevicePtr, len: u64, scale: f32, add: bool) -> Self {
        let count = sources.len();
        assert!((1..=MAX_RANKS).contains(&count), "a sum of {count} ranks, expected 1 to {MAX_RANKS}");
        let mut all = [0; MAX_RANKS];
        all[..count].copy_from_slice(sources);
        SumRanksArgs { sources: all, out, len, count: count as u32, add: add.into(), scale }
    }
}

// SAFETY: repr(C), the fields of `SumRanksArgs` in sum_ranks.cuh.
unsafe impl Args for SumRanksArgs {
    fn launch(&self, max_blocks: u32) -> Option<Launch> {
        Launch::elements(self.len, max_blocks)
    }

    fn accesses(&self, [from, to]: [Dtype; 2]) -> Vec<Access> {
        let sources = self.sources.iter().take(self.count as usize);
        let reads = sources.map(|&source| Access::read(source, self.len, from.size()));
        reads.chain([Access::write(self.out, self.len, to.size())]).collect()
    }
}
