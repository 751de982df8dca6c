//! `assert_fits!`.

/// Fails to compile if a rank of a model needs more memory than it has.
///
/// ```text
/// assert_fits!(MODEL, KEY = VALUE, ..);
/// ```
///
/// | key | value | if unsaid |
/// |---|---|---|
/// | `budget` | a rank's memory: a number and B, KB, MB, GB, TB, KiB, MiB, GiB or TiB, such as `"80 GiB"` | must be said |
/// | `strategy` | what is sharded, a [`Strategy`](crate::spec::Strategy) | `OptimGradsParams` |
/// | `ranks` | ranks that share the shards, the size of the mesh's `dp_shard` dim | 1 |
/// | `tp` | tensor-parallel ranks | 1 |
/// | `precision` | dtypes, a [`MixedPrecision`](crate::MixedPrecision) | `MixedPrecision::F32` |
/// | `optimizer_states` | f32 buffers that the optimizer keeps | 2, as AdamW does |
/// | `outer_ranks` | replicas of the sharded model, the size of the mesh's `dp_outer` dim | 1 |
/// | `outer` | what these share, an [`OuterStrategy`](crate::spec::OuterStrategy) | `NoShard` |
/// | `alignment` | where shards may end, a [`ShardAlignment`](crate::layout::ShardAlignment); under `Row` the figure is an upper bound | `Element` |
/// | `reshard` | when whole weights are resharded between forward and backward, a [`ReshardAfterForward`](crate::spec::ReshardAfterForward) | `Always` |
/// | `prefetch` | units gathered ahead | 1 |
/// | `gather_budget` | most elements of units gathered at a time | `None` |
/// | `reduce_budget` | most elements of units' gradients unreduced at a time | `None`: those of two units |
/// | `no_sync` | some microbatches reduce nothing | `false` |
/// | `registered` | the pools are registered with NCCL | `false` |
///
/// Keys may be in any order. Counted are weights, main weights, main gradients, optimizer state and the pools
/// of gathered weights and unreduced gradients, with all padding:
/// [`StaticLayout::memory_with`](crate::layout::StaticLayout::memory_with). Activations are *not*
/// counted, nor is what the program allocates itself: leave room for them in the budget.
///
/// All shapes must be declared; see [`StaticLayout`](crate::layout::StaticLayout) for what that takes and for
/// single figures. Where an item can stand, so can the macro.
///
/// ```
/// use fsdp::prelude::*;
///
/// #[derive(FsdpUnit)]
/// struct Block {
///     #[fsdp(shape = [4096, 4096])]
///     up: Param,
///     #[fsdp(shape = [4096, 4096])]
///     down: Param,
/// }
///
/// #[derive(FsdpUnit)]
/// struct Net {
///     layers: [Unit<Block>; 32],
/// }
///
/// // 1 Gi elements in f32: 16 GiB of weights, gradients and AdamW's state, over 8 ranks, and whole buffers of
/// // two layers.
/// fsdp::assert_fits!(Net, strategy = Strategy::OptimGradsParams, ranks = 8, budget = "2.5 GiB");
/// ```
///
/// With `budget = "2 GiB"` the error is: "Net needs 2.5 GiB a rank with optim-grads-params over 8 ranks (model
/// weights 0.5, main gradients 0.5, optimizer state 1.0, gather pool 0.3, reduce pool 0.3): more than the
/// budget of 2 GiB".
#[macro_export]
macro_rules! assert_fits {
    ($model:ty, $($key:ident = $value:expr),* $(,)?) => {
        const _: () = $crate::__private::assert_fits::<$model>(
            $crate::__private::stringify!($model),
            #[allow(clippy::needless_update)]
            &$crate::__private::FitOptions { $($key: $value,)* ..$crate::__private::FitOptions::DEFAULT },
        );
    };
}
