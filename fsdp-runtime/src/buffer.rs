//! Flat buffers of one bucket on one rank: model weights, main weights, main gradients.

use std::ops::Range;

use crate::comm::CommError;
use crate::device::Slice;
use crate::layout::BucketLayout;
use crate::memory::{Account, Category};
use crate::spec::{Dtype, MixedPrecision, Strategy};

/// Which rank a buffer is of, and what is shared among the ranks.
#[derive(Clone, Copy, Debug)]
pub struct Placement {
    /// What the inner ranks share.
    pub strategy: Strategy,
    /// This rank's index among those that share the shards.
    pub rank: usize,
    /// This rank's index among the outer ones.
    pub outer_rank: usize,
}

/// One flat buffer of a bucket, or the part of it that this rank holds: all of it, with the rank's shard as a
/// part (a virtual shard), the shard, or a part of the shard.
#[derive(Clone, Debug)]
pub struct DataParallelBuffer {
    data: Slice,
    held: Range<usize>,
    shard: Range<usize>,
}

impl DataParallelBuffer {
    /// What is held.
    pub fn data(&self) -> &Slice {
        &self.data
    }

    /// Elements of the bucket that are held.
    pub fn held(&self) -> Range<usize> {
        self.held.clone()
    }

    /// This rank's shard, virtual or real.
    ///
    /// # Panics
    /// If it is not held: this is a part of it.
    pub fn shard(&self) -> Slice {
        self.part(self.shard.clone())
    }

    /// The elements `part` of the bucket.
    ///
    /// # Panics
    /// If they are not held.
    pub fn part(&self, part: Range<usize>) -> Slice {
        let inside = self.held.start <= part.start && part.start <= part.end && part.end <= self.held.end;
        assert!(inside, "elements {part:?} of a bucket of which {:?} are held", self.held);
        let start = self.held.start;
        self.data.range(part.start - start..part.end - start)
    }
}

/// The buffers of one bucket that live as long as the model.
#[derive(Clone, Debug)]
pub struct BucketBuffers {
    /// Where each parameter is.
    pub layout: BucketLayout,
    /// Elements of this rank's shard.
    pub shard: Range<usize>,
    /// Elements that this rank's optimizer updates.
    pub owned: Range<usize>,
    /// Weights in the model dtype: the all-gather's input, or the whole (ZeRO-0 to 2).
    pub model_weight: DataParallelBuffer,
    /// FP32 weights that the optimizer works on; `None` if it works on the model weights, or the bucket is
    /// frozen.
    pub main_weight: Option<DataParallelBuffer>,
    /// Reduced gradients, in the dtype the precision has for them; `None` if frozen, or held only while they are used.
    pub main_grad: Option<DataParallelBuffer>,
}

impl BucketBuffers {
    /// Allocates what the strategy and the precision ask for, main gradients if `keep_grads`; all zeros.
    ///
    /// # Errors
    /// Those of [`Account::allocate`].
    ///
    /// # Safety
    /// As for [`Slice::zeros_in`], for each of the buffers.
    pub unsafe fn allocate(
        account: &Account,
        layout: BucketLayout,
        placement: Placement,
        precision: &MixedPrecision,
        keep_grads: bool,
    ) -> Result<Self, CommError> {
        let Placement { strategy, rank, outer_rank } = placement;
        let (dtype, trainable) = (layout.key.dtype, layout.key.requires_grad);
        let shard = layout.shard_range(rank);
        let sharded = |sharded: bool| if sharded { shard.clone() } else { 0..layout.size };
        let owned = if layout.outer > 1 {
            layout.outer_part(rank, outer_rank)
        } else {
            sharded(strategy.shards_optim())
        };
        let allocate = |category, dtype, held: Range<usize>| -> Result<DataParallelBuffer, CommError> {
            // SAFETY: the caller's promise.
            let data = unsafe { account.allocate(category, dtype, held.len()) }?;
            Ok(DataParallelBuffer { data, held, shard: shard.clone() })
        };
        let held = sharded(strategy.shards_params());
        // What is whole is used where it is: the parameters' tensors have it meanwhile.
        let parts = if held.len() == layout.size { layout.parts() } else { Vec::new() };
        // SAFETY: the caller's promise.
        let data = unsafe { account.allocate_in_pieces(Category::ModelWeights, dtype, held.len(), &parts) }?;
        let model_weight = DataParallelBuffer { data, held, shard: shard.clone() };
        let main_weight = (trainable && precision.main_weights && dtype != Dtype::F32)
            .then(|| allocate(Category::MainWeights, Dtype::F32, owned.clone()))
            .transpose()?;
        let main_grad = (trainable && keep_grads)
            .then(|| allocate(Category::MainGrads, precision.main_grads, sharded(strategy.shards_grads())))
            .transpose()?;
        Ok(BucketBuffers { layout, shard, owned, model_weight, main_weight, main_grad })
    }

    /// Which of these elements of the bucket this rank's optimizer updates.
    pub(crate) fn owned_of(&self, part: &Range<usize>) -> Range<usize> {
        intersection(part, &self.owned)
    }

    /// The buffer the optimizer works on.
    pub fn optimizer_weight(&self) -> &DataParallelBuffer {
        self.main_weight.as_ref().unwrap_or(&self.model_weight)
    }
}

/// What both ranges have; empty if that is nothing.
pub(crate) fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}
