//! Counts the bytes that a rank holds, by purpose.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::Serialize;

use crate::comm::{Allocate, CommError};
use crate::device::{HostMemory, Memory, OnFree, Slice};
use crate::spec::Dtype;

/// What a flat buffer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Model weights kept between steps, in the model dtype.
    ModelWeights,
    /// FP32 main weights of 16-bit groups.
    MainWeights,
    /// Main gradients, FP32.
    MainGrads,
    /// State of the optimizer.
    OptimizerState,
    /// Buffers that hold gathered weights.
    GatherPool,
    /// Buffers that hold unreduced gradients.
    ReducePool,
    /// Whole buckets while a step runs that needs parameters whole.
    OwnerStep,
    /// Averages of the weights.
    WeightAverage,
    /// Copies that are being saved in the background.
    Snapshot,
    /// What communicators sum in, where a sum is added to its destination or widened.
    Collectives,
}

impl Category {
    /// All of them, in the order of reports.
    pub const ALL: [Category; 10] = [
        Category::ModelWeights,
        Category::MainWeights,
        Category::MainGrads,
        Category::OptimizerState,
        Category::GatherPool,
        Category::ReducePool,
        Category::OwnerStep,
        Category::WeightAverage,
        Category::Snapshot,
        Category::Collectives,
    ];

    /// Name in tables and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Category::ModelWeights => "model_weights",
            Category::MainWeights => "main_weights",
            Category::MainGrads => "main_grads",
            Category::OptimizerState => "optimizer_state",
            Category::GatherPool => "gather_pool",
            Category::ReducePool => "reduce_pool",
            Category::OwnerStep => "owner_step",
            Category::WeightAverage => "weight_average",
            Category::Snapshot => "snapshot",
            Category::Collectives => "collectives",
        }
    }
}

/// Bytes of one category on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// What for.
    pub category: Category,
    /// Bytes held now.
    pub current: usize,
    /// Most bytes ever held at once.
    pub peak: usize,
}

#[derive(Debug, Default)]
struct Counter {
    current: AtomicUsize,
    peak: AtomicUsize,
}

/// Allocates flat buffers of one rank and counts their bytes.
#[derive(Clone, Debug)]
pub struct Account {
    memory: Arc<dyn Memory>,
    counters: Arc<[Counter; 10]>,
}

impl Default for Account {
    fn default() -> Self {
        Self::new(Arc::new(HostMemory))
    }
}

impl Account {
    /// An account of buffers in `memory`.
    pub fn new(memory: Arc<dyn Memory>) -> Self {
        Account { memory, counters: Arc::default() }
    }

    /// The same account, whose buffers are in other memory.
    pub fn in_memory(&self, memory: Arc<dyn Memory>) -> Account {
        Account { memory, counters: self.counters.clone() }
    }

    /// Whether buffers are in memory of the host.
    pub fn is_host(&self) -> bool {
        self.memory.is_host()
    }

    /// Makes buffers that are counted under `category`, for [`Communicator::allocate_by`](crate::comm::Communicator::allocate_by).
    pub fn allocator(&self, category: Category) -> Allocate {
        let account = self.clone();
        // SAFETY: who calls it promises what is asked for here.
        Allocate::new(move |dtype, len| unsafe { account.allocate(category, dtype, len) })
    }

    /// A zeroed buffer of `len` elements, counted under `category` until its last slice is dropped.
    ///
    /// # Errors
    /// [`CommError::Memory`] if there is no such memory, with what is held.
    ///
    /// # Safety
    /// As for [`Slice::zeros_in`].
    pub unsafe fn allocate(&self, category: Category, dtype: Dtype, len: usize) -> Result<Slice, CommError> {
        // SAFETY: the caller's promise.
        unsafe { self.allocate_in(&*self.memory, category, dtype, len, &[]) }
    }

    /// As [`Account::allocate`], but in pieces, see [`Slice::zeros_in_pieces`].
    ///
    /// # Errors
    /// As for [`Account::allocate`].
    ///
    /// # Safety
    /// As for [`Account::allocate`].
    pub unsafe fn allocate_in_pieces(
        &self,
        category: Category,
        dtype: Dtype,
        len: usize,
        parts: &[Range<usize>],
    ) -> Result<Slice, CommError> {
        // SAFETY: the caller's promise.
        unsafe { self.allocate_in(&*self.memory, category, dtype, len, parts) }
    }

    /// As [`Account::allocate`], but in memory of the host, wherever the other buffers are.
    ///
    /// # Errors
    /// As for [`Account::allocate`].
    ///
    /// # Safety
    /// As for [`Account::allocate`].
    pub(crate) unsafe fn allocate_on_host(
        &self,
        category: Category,
        dtype: Dtype,
        len: usize,
    ) -> Result<Slice, CommError> {
        // SAFETY: the caller's promise.
        unsafe { self.allocate_in(&HostMemory, category, dtype, len, &[]) }
    }

    /// # Safety
    /// As for [`Account::allocate`].
    unsafe fn allocate_in(
        &self,
        memory: &dyn Memory,
        category: Category,
        dtype: Dtype,
        len: usize,
        parts: &[Range<usize>],
    ) -> Result<Slice, CommError> {
        let freed = self.counters.clone();
        let on_free = move |bytes| {
            freed[category as usize].current.fetch_sub(bytes, Ordering::Relaxed);
        };
        // SAFETY: the caller's promise.
        let slice = unsafe {
            let on_free: Option<OnFree> = Some(Box::new(on_free));
            match parts {
                [] => Slice::zeros_in(memory, dtype, len, on_free),
                parts => Slice::zeros_in_pieces(memory, dtype, len, parts, on_free),
            }
        };
        let slice = slice.map_err(|error| self.exhausted(error, category))?;
        let counter = &self.counters[category as usize];
        let now = counter.current.fetch_add(slice.bytes(), Ordering::Relaxed) + slice.bytes();
        counter.peak.fetch_max(now, Ordering::Relaxed);
        Ok(slice)
    }

    /// A zeroed buffer of `len` elements that is gone before the call that needs it ends, and is not counted.
    ///
    /// # Errors
    /// As for [`Account::allocate`].
    ///
    /// # Safety
    /// As for [`Account::allocate`].
    pub(crate) unsafe fn allocate_briefly(&self, dtype: Dtype, len: usize) -> Result<Slice, CommError> {
        // SAFETY: the caller's promise.
        unsafe { Slice::zeros_in(&*self.memory, dtype, len, None) }
    }

    /// Adds to an error what the memory was for, and what else is held.
    fn exhausted(&self, error: CommError, category: Category) -> CommError {
        let CommError::Memory { device, message } = error else { return error };
        let held = self.report().into_iter().filter(|usage| usage.current > 0);
        let held: Vec<String> =
            held.map(|usage| format!("{} {} bytes", usage.category.name(), usage.current)).collect();
        let held = if held.is_empty() { "nothing".to_owned() } else { held.join(", ") };
        CommError::Memory { device, message: format!("{message}, for {}; held are: {held}", category.name()) }
    }

    /// Bytes of `category`.
    pub fn usage(&self, category: Category) -> Usage {
        let counter = &self.counters[category as usize];
        Usage {
            category,
            current: counter.current.load(Ordering::Relaxed),
            peak: counter.peak.load(Ordering::Relaxed),
        }
    }

    /// Bytes of every category.
    pub fn report(&self) -> Vec<Usage> {
        Category::ALL.into_iter().map(|category| self.usage(category)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(dtype: Dtype, len: usize) -> String {
        let account = Account::default();
        // SAFETY: nothing is allocated.
        let error = unsafe { account.allocate(Category::GatherPool, dtype, len) }.unwrap_err();
        assert_eq!(account.usage(Category::GatherPool).peak, 0);
        error.to_string()
    }

    #[test]
    fn a_length_whose_bytes_cannot_be_counted_is_refused() {
        // Four times the first is 2^64 + 4: four bytes, if it wraps round.
        for (dtype, len) in [
            (Dtype::F32, (1 << 62) + 1),
            (Dtype::F32, 1 << 62),
            (Dtype::F32, usize::MAX),
            (Dtype::BF16, (1 << 63) + 1),
            (Dtype::F16, usize::MAX),
        ] {
            let expected = format!(
                "memory: {len} elements of {dtype} are more bytes than can be counted, for gather_pool; held are: nothing"
            );
            assert_eq!(refused(dtype, len), expected);
        }
    }

    #[test]
    fn a_length_that_no_allocation_can_have_is_refused() {
        // 2^63 bytes and more are no Rust allocation; the largest that is one is not to be had.
        for (dtype, len, bytes) in [
            (Dtype::F32, 1 << 61, 1usize << 63),
            (Dtype::BF16, usize::MAX / 2, usize::MAX - 1),
            (Dtype::F32, (1 << 61) - 16, (1 << 63) - 64),
        ] {
            let expected =
                format!("host: {bytes} bytes cannot be allocated, for gather_pool; held are: nothing");
            assert_eq!(refused(dtype, len), expected);
        }
    }
}
