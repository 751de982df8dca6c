//! Flat buffers of one parameter group on one rank: model weights, main weights, main gradients.

use std::ops::Range;

use crate::device::Slice;
use crate::layout::BucketLayout;
use crate::memory::{Account, Category};
use crate::spec::{Dtype, Strategy};

/// One flat buffer of a bucket: this rank's shard of it, or the whole with the shard as a part of it (a
/// virtual shard).
#[derive(Clone, Debug)]
pub struct DataParallelBuffer {
    data: Slice,
    sharded: bool,
    shard: Range<usize>,
    size: usize,
}

impl DataParallelBuffer {
    fn allocate(
        account: &Account,
        category: Category,
        dtype: Dtype,
        layout: &BucketLayout,
        rank: usize,
        sharded: bool,
    ) -> Self {
        let shard = layout.shard_range(rank);
        let len = if sharded { shard.len() } else { layout.size };
        DataParallelBuffer { data: account.allocate(category, dtype, len), sharded, shard, size: layout.size }
    }

    /// True if only the shard is held.
    pub fn is_sharded(&self) -> bool {
        self.sharded
    }

    /// What is held: the shard or the whole.
    pub fn data(&self) -> &Slice {
        &self.data
    }

    /// Elements of the bucket that are held.
    pub fn extent(&self) -> Range<usize> {
        if self.sharded { self.shard.clone() } else { 0..self.size }
    }

    /// This rank's shard, virtual or real.
    pub fn shard(&self) -> Slice {
        if self.sharded { self.data.clone() } else { self.data.range(self.shard.clone()) }
    }

    /// The elements `part` of the bucket, which must be held.
    pub fn part(&self, part: Range<usize>) -> Slice {
        let start = self.extent().start;
        self.data.range(part.start - start..part.end - start)
    }
}

/// The buffers of one bucket that live as long as the model.
#[derive(Clone, Debug)]
pub struct GroupBuffers {
    /// Where each parameter is.
    pub layout: BucketLayout,
    /// Weights in the model dtype: the all-gather's input, or the whole (ZeRO-0 to 2).
    pub model_weight: DataParallelBuffer,
    /// FP32 weights that the optimizer works on; `None` if it works on the model weights, or the group is
    /// frozen.
    pub main_weight: Option<DataParallelBuffer>,
    /// Reduced gradients, FP32; `None` if frozen, or held only while they are used.
    pub main_grad: Option<DataParallelBuffer>,
}

impl GroupBuffers {
    /// Allocates what `strategy` asks for, main gradients if `keep_grads`; all zeros.
    pub fn allocate(
        account: &Account,
        layout: BucketLayout,
        strategy: Strategy,
        rank: usize,
        keep_grads: bool,
    ) -> Self {
        let (dtype, trainable) = (layout.key.dtype, layout.key.requires_grad);
        let allocate = |category, dtype, sharded| {
            DataParallelBuffer::allocate(account, category, dtype, &layout, rank, sharded)
        };
        let model_weight = allocate(Category::ModelWeights, dtype, strategy.shards_params());
        let main_weight = (trainable && dtype != Dtype::F32)
            .then(|| allocate(Category::MainWeights, Dtype::F32, strategy.shards_optim()));
        let main_grad = (trainable && keep_grads)
            .then(|| allocate(Category::MainGrads, Dtype::F32, strategy.shards_grads()));
        GroupBuffers { layout, model_weight, main_weight, main_grad }
    }

    /// The elements of the bucket that this rank's optimizer updates.
    pub fn optimizer_extent(&self, strategy: Strategy, rank: usize) -> Range<usize> {
        if strategy.shards_optim() { self.layout.shard_range(rank) } else { 0..self.layout.size }
    }

    /// The buffer the optimizer works on.
    pub fn optimizer_weight(&self) -> &DataParallelBuffer {
        self.main_weight.as_ref().unwrap_or(&self.model_weight)
    }
}
