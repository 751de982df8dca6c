//! What a rank holds of the training state, piece by piece, and which of it this rank saves.

use std::ops::Range;

use crate::buffer::{BucketBuffers, intersection};
use crate::device::Slice;
use crate::engine::{Ctx, Ema, Id, OwnerOptimizer, ParamId, ShardedOptimizer};
use crate::optim::{Optimizer, OwnerRule};
use crate::spec::Dtype;

/// Elements of a parameter-shaped f32 tensor that this rank holds, and where.
pub(crate) struct Held {
    pub param: ParamId,
    /// Elements of the flattened parameter.
    pub elements: Range<usize>,
    pub memory: Slice,
    /// This rank writes them to a checkpoint: of all ranks that hold an element, one does.
    pub saves: bool,
}

/// Parameter-shaped f32 tensors of one kind, such as the first moments.
pub struct HeldState {
    pub(crate) name: &'static str,
    /// The physical parameters that have one, on any rank.
    pub(crate) params: Vec<ParamId>,
    pub(crate) pieces: Vec<Held>,
}

impl std::fmt::Debug for HeldState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeldState").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The dtype in which a parameter's weights are saved.
pub(crate) fn saved_dtype(ctx: &Ctx, param: ParamId) -> Dtype {
    ctx.place_of(param).0.optimizer_weight().data().dtype()
}

/// The weights that this rank writes to a checkpoint: those that the optimizer works on.
pub(crate) fn saved_weights(ctx: &Ctx) -> Vec<Held> {
    let mut pieces = Vec::new();
    for bucket in &ctx.resources.buckets {
        let (saved, weights) = (ctx.saved_range(bucket), bucket.optimizer_weight());
        for item in &bucket.layout.items {
            let range = intersection(&item.range(), &saved);
            if !range.is_empty() {
                let memory = weights.part(range.clone());
                let elements = range.start - item.start..range.end - item.start;
                pieces.push(Held { param: ParamId::new(item.param), elements, memory, saves: true });
            }
        }
    }
    pieces
}

/// Cuts `range` of the bucket `bucket`, which lies in one item that starts at `start` and is kept in `memory`, where
/// this rank begins and ends to be the one that saves.
fn cut(
    ctx: &Ctx,
    bucket: &BucketBuffers,
    (param, start): (ParamId, usize),
    range: Range<usize>,
    memory: &Slice,
) -> Vec<Held> {
    let saved = intersection(&range, &ctx.saved_range(bucket));
    let parts = [(range.start..saved.start, false), (saved.clone(), true), (saved.end..range.end, false)];
    let parts = if saved.is_empty() { [(range.clone(), false), (0..0, false), (0..0, false)] } else { parts };
    let held = |(part, saves): (Range<usize>, bool)| Held {
        param,
        elements: part.start - start..part.end - start,
        memory: memory.range(part.start - range.start..part.end - range.start),
        saves,
    };
    parts.into_iter().filter(|(part, _)| !part.is_empty()).map(held).collect()
}

/// The states of an optimizer over shards.
pub(super) fn states<O: Optimizer>(optimizer: &ShardedOptimizer<O>, ctx: &Ctx) -> Vec<HeldState> {
    let held = |index: usize| {
        let mut pieces = Vec::new();
        let buckets = ctx.resources.buckets.iter().zip(&optimizer.states).zip(&optimizer.parts);
        for ((bucket, states), parts) in buckets {
            let Some(state) = states.get(index) else { continue };
            for part in parts {
                let (_, item) = ctx.place_of(part.param);
                let memory = state.range(part.state..part.state + part.range.len());
                pieces.extend(cut(ctx, bucket, (part.param, item.start), part.range.clone(), &memory));
            }
        }
        pieces
    };
    let names = optimizer.rule().state_names().iter().enumerate();
    let state = |(index, name): (usize, &&'static str)| HeldState {
        name,
        params: optimizer.updated.clone(),
        pieces: held(index),
    };
    names.map(state).collect()
}

/// The states of the owners' rule: whole on the owner, which saves them.
pub(super) fn owner_states<R: OwnerRule, O: Optimizer>(optimizer: &OwnerOptimizer<R, O>) -> Vec<HeldState> {
    let params: Vec<ParamId> = optimizer.owned_states().map(|(param, _)| param).collect();
    let names = optimizer.rule().state_names().iter().enumerate();
    let state = |(index, name): (usize, &&'static str)| {
        let piece = |(param, states): (ParamId, &[Slice])| {
            let memory = states.get(index)?.clone();
            Some(Held { param, elements: 0..memory.len(), memory, saves: true })
        };
        let pieces = optimizer.owned_states().filter_map(piece).collect();
        HeldState { name, params: params.clone(), pieces }
    };
    names.map(state).collect()
}

/// An average of the weights.
pub(super) fn average(average: &Ema, ctx: &Ctx) -> HeldState {
    let mut state = HeldState { name: "", params: Vec::new(), pieces: Vec::new() };
    for (bucket, shard) in ctx.resources.buckets.iter().zip(&average.shards) {
        let Some(shard) = shard else { continue };
        for item in &bucket.layout.items {
            let (param, owned) = (ParamId::new(item.param), &bucket.owned);
            state.params.push(param);
            let range = bucket.owned_of(&item.range());
            if !range.is_empty() {
                let memory = shard.range(range.start - owned.start..range.end - owned.start);
                state.pieces.extend(cut(ctx, bucket, (param, item.start), range, &memory));
            }
        }
    }
    state
}
